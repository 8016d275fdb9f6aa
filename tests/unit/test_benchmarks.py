"""Every benchmark can be imported, and every theme's script leads to a measurement with a `main`."""

from __future__ import annotations

import importlib
import pkgutil

import benchmarks
import pytest

MODULES = [m.name for m in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.") if not m.name.startswith("benchmarks.results")]
THEMES = [name for name in MODULES if name.count(".") == 1 and hasattr(importlib.import_module(name), "MEASUREMENTS")]


@pytest.mark.parametrize("name", MODULES)
def test_it_imports(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", THEMES)
def test_every_measurement_of_a_theme_can_be_started(name: str) -> None:
    for place in importlib.import_module(name).MEASUREMENTS.values():
        assert callable(importlib.import_module(f"benchmarks.parts.{place.partition(':')[0]}").main)
