"""GPU tests run where there is a GPU, slow ones when asked for."""

import atexit
import gc
import os
import sys
from pathlib import Path

import pytest

# assertions of helpers explain themselves as those of tests do
pytest.register_assert_rewrite("tests.fixtures", "tests.contract.matrix", "tests.contract.precision")

TESTS = Path(__file__).parent
LONGEST = (
    "hf/test_compile", "core/test_compile", "calibration/test_calibrate", "hf/test_generation", "contract/test_matrix",
    "hf/test_sharing", "calibration/test_near_and_far", "hf/test_batching", "test_attention", "report/test_html",
    "training/test_killed", "hf/test_saving", "hf/test_streaming", "test_host_cost", "hf/test_continuous_batching",
    "evaluation/test_retrieval", "analysis/test_inspect", "experiments/test_run", "test_properties",
    "hf/test_cuda_graphs", "test_batching", "hf/test_families", "hf/test_smollm2", "training/test_trainer",
    "cli/test_evaluate", "parallel/test_context_parallel", "hf/test_families_dense", "data/test_prepare",
    "test_padding", "hf/test_training", "experiments/test_comparison", "training/test_resume",
    "contract/test_retrieve", "test_benchmarks", "contract/test_precision", "utils/test_extras", "cli/test_study",
    "analysis/test_laws", "report/test_page", "test_near_and_far", "fuzz/test_fuzz", "training/test_causal",
    "hf/test_gradients", "report/test_check_results", "experiments/test_causal", "test_structure",
)  # fmt: skip

# what torch says to itself while it compiles for a GPU
WORDS = (
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
)


def pytest_addoption(parser):
    parser.addoption("--processes", type=int, default=1, help="Run files side by side, in copies of this process.")


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None):  # the process that hands out tests needs neither torch nor this
        return
    gc.disable()  # until all is imported, which leaves no garbage
    import torch

    if config.getoption("processes") > 1 and torch.cuda.is_available():
        print("--processes: a copy of a process cannot use a GPU, so there is one process; -n makes several")
        config.option.processes = 1
    if hasattr(config, "workerinput") or config.getoption("processes") > 1:  # they share the cores already
        torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.fixtures.interpreter import shorten_interpreter

        shorten_interpreter()


def pytest_collection_modifyitems(config, items):
    import torch

    chosen = config.option.markexpr
    dropped = []
    for item in items:
        without_gpu = "gpu" in item.keywords and not torch.cuda.is_available()
        unasked = "slow" in item.keywords and "slow" not in chosen
        if without_gpu or unasked:
            dropped.append(item)
        elif "gpu" in item.keywords:
            item.add_marker(pytest.mark.filterwarnings(*WORDS))
    # the longest files first, so that no worker is left with one at the end
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(TESTS).with_suffix("").as_posix(), len(order)))
    if gone := set(dropped):
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish(session):
    """Modules live to the end: a collection of garbage, as after every compilation, need not look through them."""
    from tests.fixtures.commands import keep_commands
    from tests.fixtures.figures import render_on_demand
    from tests.fixtures.logs import record_at_root

    keep_commands()
    record_at_root()
    render_on_demand()
    if "torch._dynamo" in sys.modules:
        from tests.fixtures.compilation import shorten_tracing

        shorten_tracing()
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # what extension modules count at the end is not taken for a leak


def pytest_runtestloop(session):
    count = session.config.getoption("processes")
    if count == 1 or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own
    from tests.fixtures.processes import run_in_processes

    return run_in_processes(session, count)


def pytest_runtest_setup(item):
    """What a fixture of a file draws is rendered if the first test that asks for it is marked: mark the whole file."""
    from tests.fixtures.figures import Rendering

    Rendering.wanted = "figures" in item.keywords


def pytest_runtest_logreport(report):
    """Name a failure at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()
        errors = [line for line in lines if line.startswith("E ")][:1]  # what the last line may not say
        print("\n" + "\n".join((f"FAILED {report.nodeid}: {lines[-1] if lines else ''}", *errors)), flush=True)


@pytest.fixture(autouse=True)
def _seed():
    from tests.fixtures.seeds import set_seed

    set_seed(0)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small corpus, prepared."""
    from tests.fixtures.corpus import make_corpus

    return make_corpus(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def on_one_thread():
    from tests.fixtures.training import one_cpu_thread

    with one_cpu_thread():
        yield
