"""The command line as a whole: its subcommands, in the order a newcomer meets them."""

from __future__ import annotations

from typing import Annotated

import typer

from moegraph.cli import (
    bench,
    checkpoint,
    compare,
    compile_,
    data,
    doctor,
    export,
    init,
    inspect_,
    schema,
    train,
    verify,
)

app = typer.Typer(
    name="moegraph",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def moegraph(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Goes with any command.")
    ] = False,
) -> None:
    """A spec becomes a graph, passes rewrite it, torch.compile runs it, and a mixture-of-experts model trains.

    SPEC is a YAML file or a preset such as presets/tiny.yaml; left out, it is ./moegraph.yaml.
    Exit status: 0 fine, 1 the run failed, 2 the spec or the call is wrong, 3 a check did not hold.
    """
    del debug  # read by moegraph.cli.main, before there is a parser
    if version:
        import moegraph

        print(f"moegraph {moegraph.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


app.command("compile")(compile_.compile_command)
app.command("train")(train.train_command)
app.command("compare")(compare.compare_command)
app.command("inspect")(inspect_.inspect_command)
app.command("verify")(verify.verify_command)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("export")(export.export_command)
app.add_typer(data.app, name="data")
app.add_typer(bench.bench_app, name="bench")
app.command("schema")(schema.schema_command)
app.command("init")(init.init_command)
app.command("doctor")(doctor.doctor_command)
