"""The command line: flags -> RunConfig -> run(); exit codes and nothing else. Imports no torch."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_origin

import typer

from cbatch import __version__
from cbatch.config import (
    BenchConfig,
    DisplayConfig,
    EngineConfig,
    InputConfig,
    OutputConfig,
    PromptConfig,
    RunConfig,
    SamplingParams,
    TaskConfig,
)
from cbatch.errors import Fatal, SettingError, UsageError
from cbatch.settings import by_field, declared, field_names, flag_names, with_home

_PANELS: dict[str, tuple[str, type]] = {
    "input": ("Input", InputConfig),
    "prompt": ("Prompt", PromptConfig),
    "sampling": ("Sampling", SamplingParams),
    "engine": ("Engine", EngineConfig),
    "output": ("Output", OutputConfig),
    "task": ("Task", TaskConfig),
    "display": ("Display", DisplayConfig),
    "bench": ("Benchmark", BenchConfig),
}
_RUN_PANELS = [panel for panel in _PANELS if panel != "bench"]
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_INPUTS_HELP = "Files, folders, patterns, hf://NAME?split=S, or - for standard input."

app = typer.Typer(
    name="cbatch",
    help="Batch inference with language models: prompts in, completions out as they finish, nothing lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `cbatch` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that can't show a prompt is no reason to fail
    try:
        app()
    except OSError as error:  # a file that can't be read, whichever it is
        place = f"{error.filename}: " if error.filename else ""
        _end(Fatal(f"{place}{error.strerror or error}"))
    except Fatal as error:
        _end(error)


def _end(error: Fatal) -> None:
    from cbatch.run import fatal

    sys.exit(fatal(error))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cbatch {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None: ...


def _run(**values: Any) -> None:
    """Generate a completion for every row of INPUT and write it to OUT as it finishes.

    Run the same command again after an interruption and it goes on where it was.
    """
    from cbatch.run import run

    raise typer.Exit(run(_config(**values)))


def _check(**values: Any) -> None:
    """Read and tokenize all of INPUT without loading the model's weights, and say what a run would meet."""
    from cbatch.check import check

    raise typer.Exit(check(_config(**values)))


def _bench(**values: Any) -> None:
    """Measure how fast cbatch is on this machine, beside other schedules and other engines.

    Every contender must generate exactly the tokens asked for, or it is marked as invalid.
    """
    from cbatch.bench.bench import bench

    raise typer.Exit(bench(_part("bench", values), _part("engine", values)))


def _config(context: typer.Context, **values: Any) -> RunConfig:
    names = [name for panel in _RUN_PANELS for name in declared(_PANELS[panel][1])]
    given = frozenset(name for name in names if _is_given(context, name))
    return RunConfig(**{panel: _part(panel, values) for panel in _RUN_PANELS}, given=given)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the user has set a field, by a flag or in a TOML file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _part(panel: str, values: dict[str, Any]) -> Any:
    """The settings of a panel; UsageError names the flag of a value that can't be."""
    _, kind = _PANELS[panel]
    given = {name: values[name] for name in declared(kind) if name in values}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return kind(**given)
    except SettingError as error:
        flag = flag_names(declared(kind)[error.name][0])[0]
        raise UsageError(f"{flag} {error.problem}") from None


def _command(function: Callable[..., None], name: str, panels: list[str]) -> None:
    """Register a command whose options are the fields of these panels' dataclasses."""
    config = Annotated[Optional[Path], _config_option()]  # noqa: UP045 typer reads it
    parameters = [_parameter("context", typer.Context), _parameter("config", config, None)]
    if "input" in panels:
        inputs = Annotated[list[str], typer.Argument(help=_INPUTS_HELP, metavar="INPUT...")]
        parameters.insert(1, _parameter("inputs", inputs))
    for panel in panels:
        title, kind = _PANELS[panel]
        parameters += [_option(spec, hint, title) for spec, hint in declared(kind).values() if "help" in spec.metadata]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name)(function)


def _option(spec: Field[Any], hint: Any, panel: str) -> inspect.Parameter:
    """The parameter of a command that sets this field, as typer wants it."""
    kind, default = hint, spec.default
    if get_origin(hint) is tuple:
        kind, default = list[get_args(hint)[0]], []  # type: ignore[misc]
    names = flag_names(spec)
    if bool in (kind, *get_args(kind)):
        names = ["/".join(names)]  # the flag that turns it on, and the flag that turns it off
    choices = ", ".join(spec.metadata.get("choices") or ())
    kinds = set(get_args(kind) or (kind,)) - {type(None)}
    option = typer.Option(
        *names,
        help=spec.metadata["help"] + (f" ({choices})" if choices else ""),
        rich_help_panel=panel,
        metavar=_METAVARS.get(kinds.pop()),  # short, so that the names of the flags fit beside them
        show_default=default is not None and default != "" and default != [],
    )
    return _parameter(spec.name, Annotated[kind, option], default)


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _config_option() -> Any:
    return typer.Option(
        "--config",
        help="TOML file with the same settings, e.g. max-tokens = 64. Flags win over it.",
        is_eager=True,
        callback=_read_config,
        rich_help_panel="Input",
    )


def _read_config(context: typer.Context, path: Path | None) -> None:
    """Make the settings of a TOML file the defaults of this command."""
    if path is None:
        return
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        settings = tomllib.loads(Path(with_home("config", str(path))).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}: {error}") from None
    names = field_names(*(kind for _, kind in _PANELS.values()))
    fields_of = {key: names.get(key.replace("-", "_"), "") for key in settings}
    try:
        if unknown := [key for key, name in fields_of.items() if not name]:
            raise UsageError(f"unknown setting {unknown[0]!r}")
        by_name = by_field(settings, fields_of)
        context.default_map = {name: _checked_alone(name, value) for name, value in by_name.items()}
    except (SettingError, UsageError) as error:
        raise UsageError(f"--config {path}: {error}") from None


def _checked_alone(name: str, value: Any) -> Any:
    """The value of a setting in a file, as its class takes it: no conversion, so that true is no number."""
    kind = next(kind for _, kind in _PANELS.values() if name in declared(kind))
    if type(value) is int and declared(kind)[name][1] in (str, Optional[str]):  # noqa: UP045
        value = str(value)  # a text that may be a number, as of --max-failures
    return getattr(kind(**{name: value}), name)


_command(_run, "run", _RUN_PANELS)
_command(_check, "check", ["input", "prompt", "sampling", "engine", "output"])
_command(_bench, "bench", ["bench", "engine"])
