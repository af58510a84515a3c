"""Studies: plans carried out, models evaluated, results reported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from isentrope.cli.base import app, errors_in_one_line, quietly, show, started_again, study
from isentrope.cli.corpora import show_partition
from isentrope.cli.looking import laws


@study.command("list")
def study_list() -> None:
    """The plans that ship: what they measure, and how many cells that is.

    isentrope study list
    """
    with errors_in_one_line():
        from rich.console import Console

        from isentrope.experiments import plan as plans
        from isentrope.report.tables import terminal as tables

        Console().print(tables.plans([plans.described(name) for name in (*plans.OTHERS, *plans.names())]))


@study.command("run")
def study_run(
    names: Annotated[list[str], typer.Argument(metavar="PLAN…", help="Names (isentrope study list), or YAML files.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, cells and results; plans share it.")] = Path(
        "results"
    ),
    corpus: Annotated[Path | None, typer.Option("--data", help="A folder that 'isentrope data prepare' wrote.")] = None,
    lengths: Annotated[str | None, typer.Option(help="In place of the plan's, such as 128,1024.")] = None,
    positions: Annotated[
        int | None, typer.Option(help="Masked positions a document, in place of the plan's; 0 for all.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Training seeds in place of the plan's, such as 0,1,2.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the work, also on one GPU.")] = 1,
    compile: Annotated[
        bool | None,
        typer.Option(help="Compile trainings; on a GPU the long ones, by default. Many jobs hide its cost."),
    ] = None,
    helps: Annotated[bool, typer.Option("--helps", hidden=True)] = False,
) -> None:
    """Train and evaluate what is missing of a plan, then print its table. Interrupted, the same command goes on.

    The same command may also be started several times in one folder: what one does, the others leave to it.

    isentrope study run main --data data/laws --out results --jobs 4

    accelerate launch -m isentrope.cli study run main --data data/laws --out results
    """
    with errors_in_one_line():
        from isentrope.experiments import plan as plans

        given = (lengths, positions, seeds, corpus, compile) != (None,) * 5 or jobs > 1
        if decoders := _decoders(names, given):
            failed = [plan.name for plan in decoders if not _compared(plan, out)]
            raise typer.Exit(1 if failed else 0)
        if corpus is None and "dataset" in names:
            raise ValueError("data: the plan dataset needs a corpus: isentrope data prepare …, then --data FOLDER")
        chosen = [
            plans.changed(plans.load(name), lengths, positions, seeds) for name in names if name not in plans.OTHERS
        ]
        for name in () if helps else (name for name in names if name in plans.OTHERS):
            _show(name, out, corpus)
        with started_again(jobs - 1, out / "jobs"):
            failed = [plan.name for plan in chosen if not _carried_out(plan, out, corpus, compile, helps)]
        if failed:
            raise typer.Exit(1)


def _decoders(names: list[str], given: bool = False) -> list[Any]:
    """Plans for causal models, where the names are files with such plans. given: options that are not for them."""
    files = [Path(name) for name in names if name.endswith((".yaml", ".yml")) and Path(name).is_file()]
    if not files:
        return []
    from isentrope.experiments.causal_plan import load

    found = [plan for file in files if (plan := load(file)) is not None]
    if found and (len(found) < len(names) or given):
        raise ValueError("plans for decoders: expected them alone, with no option but --out")
    return found


def _compared(plan: Any, out: Path) -> bool:
    """Carry out a plan for a causal model, then show its recipes in order; whether no cell failed."""
    from isentrope.experiments.causal_plan import run
    from isentrope.report.html import recipes
    from isentrope.report.html.page import page

    quietly()
    folder, failed = run(plan, out, lambda words: typer.echo(words, err=True))
    drawn = recipes.write(folder)
    _recipes(folder)
    for path in (*drawn, page(folder)):
        typer.echo(path)
    if failed:
        typer.echo(f"isentrope: {failed} cells failed: {folder}", err=True)
    return not failed


def _recipes(folder: Path) -> None:
    """What a plan for a causal model found."""
    from rich.console import Console

    from isentrope.report.figures import retrieval
    from isentrope.report.html import recipes
    from isentrope.report.tables import leaderboard

    if (found := folder / "retrieval.json").exists():
        show(retrieval.table(found))
    show(leaderboard.table(folder))
    for line in recipes.verdict(folder):
        Console(soft_wrap=True).print(line)


def _show(name: str, out: Path, corpus: Path | None) -> None:
    """A study without cells."""
    from rich.console import Console

    from isentrope.data.prepared import PreparedCorpus
    from isentrope.report.tables import terminal as tables

    if name == "laws":
        laws(out / "laws")
        Console().print(tables.formulas(out / "laws" / "laws.json"))
    elif corpus is not None:
        show_partition(PreparedCorpus.open(corpus).folder / "manifest.json")


@study.command("status")
def study_status(
    plan: Annotated[str, typer.Argument(help="A plan's name, or a YAML file.")],
    out: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="For a script.")] = False,
) -> None:
    """How many cells of a plan are done, failed and missing.

    isentrope study status main --out results
    """
    with errors_in_one_line():
        import json

        from isentrope.experiments import causal_plan as causal
        from isentrope.experiments import plan as plans
        from isentrope.experiments.runner import status

        decoders = _decoders([plan])
        found = causal.status(decoders[0], out) if decoders else status(plans.load(plan), out)
        missing = found["cells"] - found["done"] - found["failed"]
        words = f"{plan}: {found['done']} of {found['cells']} cells done, {found['failed']} failed, {missing} missing"
        typer.echo(json.dumps(found) if as_json else words)


@study.command("figures")
def study_figures(
    corpus: Annotated[Path, typer.Option("--data", help="A folder that 'isentrope data prepare' wrote.")],
    out: Annotated[Path, typer.Option(help="The folder of the runs, whose checkpoints are used.")] = Path("results"),
) -> None:
    """The paper's figures f1 to f7 for the models of `cosscale-sweep` and `main`; what is missing is trained.

    isentrope study figures --data data/laws --out results
    """
    with errors_in_one_line():
        from isentrope.data.prepared import PreparedCorpus
        from isentrope.experiments.paper.figures import looks, trainings
        from isentrope.report.figures import inspect
        from isentrope.report.figures.losses import losses
        from isentrope.report.figures.partition import partition

        quietly()
        prepared = PreparedCorpus.open(corpus)
        say = lambda words: typer.echo(words, err=True)  # noqa: E731
        seen, runs = looks(prepared, out, say), trainings(prepared, out, say)
        folder = out / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        drawn = [
            *inspect.cosscale_panels(seen["f1"], folder / "f1"),
            *inspect.attention_at(seen["f2"], folder / "f2"),
            *partition(prepared.folder / "manifest.json", folder / "f3"),
            *losses(runs["f4"], folder / "f4"),
            *losses(runs["f5"], folder / "f5"),
            *inspect.peak_angles(seen["f1"], folder / "f6"),
            *inspect.before_and_after_rope(seen["f7"], folder / "f7"),
        ]
        typer.echo("\n".join(map(str, drawn)))


# options of `evaluate` that mean something for one kind of model alone
OF_CAUSAL = ("length", "retrieval", "documents", "save", "gguf_file", "dtype", "device")
OF_GAU = ("lengths", "positions", "protocol")


@app.command()
def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A causal model or GAU-α: a folder, or a name on the hub.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text: files, folders, globs; several times. GAU-α: what 'isentrope data prepare' wrote."),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipes to compare, several times; for causal models the usual ones.")
    ] = None,
    length: Annotated[str, typer.Option(help="Tokens read of each document; 4x: times the training length.")] = "4x",
    retrieval: Annotated[bool, typer.Option("--retrieval", help="Also ask for passkeys at that length.")] = False,
    documents: Annotated[int, typer.Option(help="At most this many documents, the first that are long enough.")] = 8,
    save: Annotated[Path | None, typer.Option(help="A new folder: the model with the best recipe.")] = None,
    lengths: Annotated[str, typer.Option(help="GAU-α: lengths in tokens.")] = "128,256,512,1024,2048,4096",
    positions: Annotated[int, typer.Option(help="GAU-α: masked positions a document; 0 for all.")] = 256,
    protocol: Annotated[
        str, typer.Option(help="GAU-α: single, one token masked at a time; random, 15 % at once.")
    ] = "single",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; results/evaluate, or for GAU-α results.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="A GGUF file in the model's folder.")] = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU where there is one.")] = "auto",
) -> None:
    """Which recipe works best for a model past its training length, on your own text. What is measured is kept.

    A causal model: perplexity by position, the best recipe, and with --save the model that has it. GAU-α: perplexity
    and accuracy of masked tokens.

    isentrope evaluate MODEL --data books --save longer

    isentrope evaluate runs/base/best --data data/laws --recipe rope --recipe rope+infoscale:count=sequence
    """
    with errors_in_one_line():
        from isentrope.evaluation.loading import causal_config, check_free, save_extended
        from isentrope.experiments import plan as plans
        from isentrope.experiments.causal_plan import single
        from isentrope.report.tables.leaderboard import best, measured
        from isentrope.report.tables.terminal import DEGRADED

        if not data:
            raise ValueError("data: expected text for a causal model, or a prepared corpus for GAU-α, got none")
        config = causal_config(model, gguf_file)
        if config is None:
            _refuse_given(context, OF_CAUSAL, "GAU-α")
            if not recipe or len(data) > 1:
                raise ValueError(f"recipe, data: expected recipes and one corpus for GAU-α, got {recipe} and {data}")
            plan = plans.single(model, recipe, lengths, positions, protocol)
            raise typer.Exit(0 if _carried_out(plan, out or Path("results"), Path(data[0])) else 1)
        _refuse_given(context, OF_GAU, config.model_type)
        check_free(save)
        loading = {"gguf_file": gguf_file, "dtype": dtype, "device": device}
        compared = single(model, config, data, recipe or [], length, documents, retrieval, **loading)
        out = out or Path("results/evaluate")
        well = _compared(compared, out)
        if save is not None:
            found = best(out / compared.name, compared.perplexity.recipes)
            if found is None:
                raise ValueError(
                    f"save: expected a recipe that is better at the end and costs {DEGRADED} % or less inside the "
                    "training length, got none; isentrope.extend and save_pretrained save a model under any"
                )
            rows = measured(out / compared.name, found)
            typer.echo(save_extended(compared.decoder["model"], found, save, gguf_file, rows))
        raise typer.Exit(0 if well else 1)


def _refuse_given(context: typer.Context, names: tuple[str, ...], kind: str) -> None:
    """Options that would be left aside without a word."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')}: not for a model of type {kind}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that 'isentrope study run' wrote, or one plan's in it.")],
    cap: Annotated[bool, typer.Option("--cap", help="Print >500 and <0.1 as the paper does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For a script: paths and verdicts.")] = False,
) -> None:
    """One page of a study, tables in Markdown, LaTeX and CSV, and whether the paper's claims hold.

    isentrope report results
    """
    with errors_in_one_line():
        import json

        from rich.console import Console

        from isentrope.report.html import page
        from isentrope.report.tables import grid

        plans, compared = page.found(folder)
        written = page.report(folder, cap)
        if as_json:
            typer.echo(json.dumps(written, ensure_ascii=False))
            return
        if plans:
            Console().print(grid.terminal(folder, cap))
        for each in compared:
            _recipes(each)
        for path in (*(file for plan in written["plans"] for file in plan["files"]), written["report"]):
            typer.echo(path)


def _carried_out(plan: Any, out: Path, corpus: Path | None, compile: bool | None = None, helps: bool = False) -> bool:
    """Run a plan, then write and show what came out; whether no cell failed."""
    from rich.console import Console

    from isentrope.experiments.runner import run
    from isentrope.report.figures.curves import curves
    from isentrope.report.html.page import page
    from isentrope.report.tables.grid import terminal, write
    from isentrope.training.trainer import Interrupted, is_main

    quietly()
    try:
        told = run(plan, out, corpus, lambda words: typer.echo(words, err=True), compile, helps)
    except Interrupted as stopped:
        typer.echo(f"isentrope: {stopped}", err=True)
        raise typer.Exit(128 + stopped.number) from None
    if is_main() and not helps:
        folder = out / plan.name
        curves(folder)
        write(folder)
        Console().print(terminal(folder))
        typer.echo(page(folder))
        if told["failed"]:
            typer.echo(
                f"isentrope: {told['failed']} of {told['cells']} cells failed: {folder / 'results.jsonl'}", err=True
            )
    return helps or not told["failed"]
