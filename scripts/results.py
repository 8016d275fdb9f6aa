"""Makes the pages under benchmarks/results and README's figures from the raw rows. Without --write it only says which differ.

python scripts/results.py           exits 1 where a page is not what the rows say
python scripts/results.py --write   writes those pages
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from benchmarks.lib.pages import stale_pages, write_pages  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages that differ")
    if parser.parse_args().write:
        print("\n".join(f"Wrote {page}" for page in write_pages()) or "Every page is as the rows say.")
        return
    stale = stale_pages()
    print(
        "\n".join(f"{page} differs from the raw rows: python scripts/results.py --write" for page in stale)
        or "Every page is as the rows say."
    )
    raise SystemExit(1 if stale else 0)


if __name__ == "__main__":
    main()
