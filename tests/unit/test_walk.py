"""What `scripts/walk.py` counts as an entry of a room, on a house of three rooms made up for it."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WALK = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "walk.py"))
FILES = {
    "core/words.py": "def say(f):\n    return f()\n",
    "kitchen/cook.py": "class Dish:\n    @property\n    def salt(self):\n        return 1\n\ndef cook(taste=None):\n    return taste() if taste else Dish()\n",
    "cellar/wine.py": "from house.kitchen.cook import cook\n\ndef pour():\n    return 1\n\ndef pair():\n    return cook(pour)\n",
    "pipeline/menu.py": (
        "from house.cellar.wine import pair, pour\nfrom house.core.words import say\nfrom house.kitchen.cook import cook\n\n"
        "def twice():\n    cook()\n    cook()\n\n"
        "def back():\n    cook()\n    pour()\n    cook()\n\n"
        "def make_course():\n    cook()\n    pour()\n\n"
        "def courses():\n    make_course()\n    make_course()\n\n"
        "def said():\n    say(cook)\n\n"
        "def salted():\n    dish = cook()\n    pour()\n    return dish.salt\n"
    ),
}


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Walks one function of the menu, and gives the walk."""
    for name, text in FILES.items():
        file = tmp_path / "house" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def walk(name: str, how: str = "walk", **settings: Any) -> Any:
        menu = importlib.import_module("house.pipeline.menu")
        walker = WALK["Walker"](tmp_path / "house", **settings)
        with walker.following():
            getattr(menu, name)()
        return getattr(walker, how)

    yield walk
    for module in [m for m in sys.modules if m == "house" or m.startswith("house.")]:
        del sys.modules[module]


def test_a_room_called_twice_in_a_row_is_entered_once(follow: Callable[..., Any]) -> None:
    walk = follow("twice")
    assert str(walk) == "kitchen x2"
    assert (walk.num_entries, walk.num_returns) == (1, 0)


def test_a_room_entered_left_and_entered_again_is_a_return(follow: Callable[..., Any]) -> None:
    walk = follow("back")
    assert str(walk) == "kitchen > cellar > kitchen"
    assert (walk.num_entries, walk.num_returns) == (3, 1)


def test_a_callback_is_no_entry_of_the_room_that_handed_it_over(follow: Callable[..., Any]) -> None:
    assert str(follow("pair")) == "cellar > kitchen"


def test_the_line_is_what_the_pipeline_enters_itself(follow: Callable[..., Any]) -> None:
    assert str(follow("pair")) == "cellar > kitchen"
    assert str(follow("pair", how="line")) == "cellar"


def test_a_form_is_looked_at_by_itself(follow: Callable[..., Any]) -> None:
    walk = follow("courses", forms=frozenset({"make_course"}))
    assert str(walk) == "kitchen > cellar | kitchen > cellar"
    assert (walk.num_entries, walk.num_returns, walk.num_returns_within_a_form) == (4, 2, 0)


def test_what_core_calls_counts_as_called_by_its_caller(follow: Callable[..., Any]) -> None:
    assert str(follow("said")) == "kitchen"


def test_reading_a_value_is_no_entry(follow: Callable[..., Any]) -> None:
    assert str(follow("salted")) == "kitchen > cellar"


def test_the_walk_ends_also_when_the_call_fails(follow: Callable[..., Any]) -> None:
    with pytest.raises(AttributeError):
        follow("no_such_function")
    assert sys.getprofile() is None
