"""`isentrope study`: the paper's experiments, and others like them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line
from isentrope.cli.data import print_partition
from isentrope.cli.jobs import Jobs
from isentrope.cli.laws import run_laws
from isentrope.cli.options import CORPUS_HELP, AsJson, Corpus
from isentrope.cli.output import Output, print_progress
from isentrope.cli.plans import report_masked_plans, run_causal_plan, run_masked_plans

study = typer.Typer(no_args_is_help=True, help="The paper's experiments, and others like them.")
app.add_typer(study, name="study")


@study.command("list")
@errors_in_one_line()
def list_plans(as_json: AsJson = False) -> None:
    """List the plans that ship: what they measure, and how many trainings and cells they have.

    isentrope study list
    """
    from isentrope.experiments import plan as plans
    from isentrope.report.tables.plans import build_plans_table

    names = (*plans.PLANS_WITHOUT_CELLS, *plans.plan_names())
    described = [plans.describe_plan(name) for name in names]
    with Output(as_json) as output:
        output.add(plans=described)
        output.print(build_plans_table(described))


@study.command("run")
@errors_in_one_line()
def run(
    names: Annotated[list[str], typer.Argument(metavar="PLAN…", help="Names (isentrope study list), or YAML files.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, cells and results; plans share it.")] = Path(
        "results"
    ),
    corpus: Corpus = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths, instead of the plan's, such as 128,1024.")] = None,
    positions: Annotated[
        int | None, typer.Option(help="Masked positions per document, instead of the plan's; 0 for all.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Training seeds, instead of the plan's, such as 0,1,2.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the work, also on one GPU.")] = 1,
    compile: Annotated[
        bool | None,
        typer.Option(help="Compile trainings; by default the long ones on a GPU. Several jobs hide its cost."),
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train and measure nothing: report what is measured so far.")
    ] = False,
    helps: Annotated[bool, typer.Option("--helps", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Train and evaluate what is missing of a plan, then print its table. Run the same command again to resume.

    The same command may run several times in one folder at once: the processes share the work.

    isentrope study run main --data data/laws --out results --jobs 4

    accelerate launch -m isentrope.cli study run main --data data/laws --out results
    """
    from isentrope.experiments.masked_plan import MaskedPlan, override_plan
    from isentrope.experiments.plan import PLANS_WITHOUT_CELLS, load_plan

    plans = [load_plan(name) for name in names if name not in PLANS_WITHOUT_CELLS]
    masked_plans = [override_plan(plan, lengths, positions, seeds) for plan in plans if isinstance(plan, MaskedPlan)]
    if len(masked_plans) < len(plans):
        has_options = (lengths, positions, seeds, corpus, compile) != (None,) * 5 or jobs > 1 or report_only
        if masked_plans or len(plans) < len(names) or has_options:
            raise ValueError("plans for decoders: expected no other plans with them, and no option but --out")
        with Output(as_json) as output:
            measured = [run_causal_plan(plan, out, output) for plan in plans]
        raise typer.Exit(0 if all(measured) else 1)
    if corpus is None and "dataset" in names:
        raise ValueError("data: the plan dataset needs a corpus: isentrope data prepare …, then --data FOLDER")
    with Output(as_json) as output:
        for name in () if helps else (name for name in names if name in PLANS_WITHOUT_CELLS):
            _run_without_cells(name, out, corpus, output)
        if report_only:
            complete = report_masked_plans(masked_plans, out, corpus, output)
        else:
            with Jobs(jobs - 1, out / "jobs") as others:
                complete = run_masked_plans(masked_plans, out, corpus, output, compile, helps, others.yield_memory)
    if not complete:
        raise typer.Exit(1)


def _run_without_cells(name: str, out: Path, corpus: Path | None, output: Output) -> None:
    """Run `laws` or `dataset`, the plans without trainings and cells."""
    from isentrope.analysis.entropy_laws import EntropyLawsConfig
    from isentrope.data.prepared import PreparedCorpus
    from isentrope.report.tables.laws import build_formulas_table

    if name == "laws":
        run_laws(EntropyLawsConfig(), out / "laws", output)
        output.print(build_formulas_table(out / "laws" / "laws.json"))
    elif corpus is not None:
        print_partition(PreparedCorpus.open(corpus).folder / "manifest.json", output)


@study.command("status")
@errors_in_one_line()
def status(
    plan: Annotated[str, typer.Argument(help="A plan's name, or a YAML file.")],
    out: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Count the cells of a plan that are done, failed and missing.

    isentrope study status main --out results
    """
    from isentrope.experiments.plan import load_plan
    from isentrope.experiments.runner import plan_status

    loaded = load_plan(plan)
    if not out.is_dir():
        raise ValueError(f"{out}: no such folder; --out names the one that 'isentrope study run {plan}' writes to")
    counts = plan_status(loaded, out)
    missing = counts["cells"] - counts["done"] - counts["failed"]
    with Output(as_json) as output:
        output.add(**counts)
        output.print(
            f"{plan}: {counts['done']} of {counts['cells']} cells done, {counts['failed']} failed, {missing} missing"
        )


@study.command("join")
@errors_in_one_line()
def join(
    folders: Annotated[list[Path], typer.Argument(help="Results of one plan, each of other seeds.")],
    out: Annotated[Path, typer.Option(help="Folder for the results of all; its name becomes the plan's.")],
    as_json: AsJson = False,
) -> None:
    """Join results of one plan that were measured apart, on other days or machines, and write their figures and page.

    isentrope study join first/study second/study --out results/study
    """
    from isentrope.experiments.joining import join_results
    from isentrope.report.figures.plan_curves import draw_curves
    from isentrope.report.html.page import write_report
    from isentrope.report.study import draw_study

    with Output(as_json) as output:
        join_results(folders, out)
        figures = [*draw_curves(out), *draw_study(out)]
        written = write_report(out)
        output.add(**written)
        files = (file for plan in written["plans"] for file in plan["files"])
        output.add_files([*figures, *files, written["report"]])


@study.command("figures")
@errors_in_one_line()
def draw_figures(
    corpus: Annotated[Path, typer.Option("--data", help=CORPUS_HELP)],
    out: Annotated[Path, typer.Option(help="The folder of the runs, whose checkpoints are used.")] = Path("results"),
    sweep: Annotated[str, typer.Option(help="The plan whose models have each CosScale.")] = "cosscale-sweep",
    main: Annotated[str, typer.Option(help="The plan whose training losses are drawn.")] = "main",
    seed: Annotated[int, typer.Option(min=0, help="Of the trainings.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Draw the paper's figures f1 to f7 for the models of two plans; what is missing is trained.

    isentrope study figures --data data/laws --out results
    """
    from isentrope.data.prepared import PreparedCorpus
    from isentrope.experiments.paper.figures import inspect_models, training_folders
    from isentrope.report.figures import inspect
    from isentrope.report.figures.losses import draw_losses
    from isentrope.report.figures.partition import draw_partition
    from isentrope.report.peaks import write_peaks

    disable_progress_bars()
    prepared = PreparedCorpus.open(corpus)
    inspected = inspect_models(prepared, out, print_progress, sweep, seed)
    runs = training_folders(prepared, out, print_progress, main, seed)
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    with Output(as_json) as output:
        output.add_files([
            *inspect.draw_cosscale_panels(inspected["f1"], folder / "f1"),
            *inspect.draw_attention(inspected["f2"], folder / "f2"),
            *draw_partition(prepared.folder / "manifest.json", folder / "f3"),
            *draw_losses(runs["f4"], folder / "f4"),
            *draw_losses(runs["f5"], folder / "f5"),
            *inspect.draw_peak_angles(inspected["f1"], folder / "f6"),
            write_peaks(inspected["f1"], folder / "f6.json"),
            *inspect.draw_scores_before_and_after_rope(inspected["f7"], folder / "f7"),
        ])  # fmt: skip
