"""Import paths of the previous release: they work, and say what they are called now."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from isentrope.deprecated import MODULES, NAMES

PACKAGES = {"study", "study.causal"}


@pytest.mark.parametrize("old", sorted(set(MODULES) - PACKAGES))
def test_old_module_leads_to_the_new_one(old):
    name = f"isentrope.{old}"
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=rf"{name} is now isentrope\.{MODULES[old]};"):
        module = import_module(name)
    if old == "study.causal.harness" and find_spec("lm_eval") is None:
        with pytest.raises(ImportError, match="lm_eval is not installed"):
            _ = module.Isentrope
        return
    for renamed in NAMES.get(old, {}):
        assert getattr(module, renamed) is not None
    with pytest.raises(AttributeError):
        _ = module.no_such_name


def test_unknown_modules_stay_unknown():
    with pytest.raises(ModuleNotFoundError, match=r"isentrope\.studies"):
        import_module("isentrope.studies")
