"""`--config FILE.yaml`: options of `pagestream serve` from a file.  The command line and the environment go before it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from pagestream.engine import StartError


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the file's values as the command's defaults.  Raises StartError for a name that is no option."""
    if path is None:
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"--config {path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartError(f"--config {path} is no YAML: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise StartError(f"--config {path} must be a mapping of options to values, such as max-num-seqs: 64")
    names = {param.name for param in context.command.params} - {"config"}
    values: dict[str, Any] = {}
    for given, value in (content or {}).items():
        name = str(given).removeprefix("--").replace("-", "_")
        if name not in names:
            raise StartError(f"--config {path}: {given!r} is no option of `pagestream serve`")
        values[name] = value
    context.default_map = {**(context.default_map or {}), **values}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar="PAGESTREAM_CONFIG", is_eager=True, callback=read_config, help="A YAML file with further options of these."
    ),
]
