"""Cases of families on ranks."""

import json

import pytest
from support.ranks import COMFY, run_ranks


@pytest.fixture(scope="module")
def selected(request):
    """The parameters of the tests of this file that were selected."""
    return [item.callspec.params for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")]


@pytest.fixture(scope="module")
def run_cases(selected):
    """Returns a function that has ranks run cases, once for each mode, and returns their reports by (family, case)."""
    runs = {}

    def reports(mode, script, world, *arguments, wanted=None, **options):
        if mode not in runs:
            runs[mode] = {}  # where the ranks fail, they do not try again
            wanted = wanted or [params["key"][1:] for params in selected if params.get("key", ("",))[0] == mode]
            prepare = sorted({family for family, _ in wanted})
            found = run_ranks(
                f"families/{script}", world, *map(str, arguments), json.dumps(wanted), preload=COMFY, prepare=prepare, **options
            )
            runs[mode] = {(report["family"], report["case"]): report for report in found}
        return runs[mode]

    return reports
