"""`pagestream replay`: compute a journalled request again and compare the bits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagestream.engine import Begun, EngineArgs, FinishReason, StartError
from pagestream.server.args import ENGINE_OPTIONS
from pagestream.server.journal_file import JournalledAnswer, check_file, load, read_options, reading
from pagestream.server.restore import rebuild
from pagestream.server.settings import ServerSettings
from pagestream.server.tools.plan import Parsers

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

Tokens = dict[tuple[int, int], tuple[int, ...]]  # by prompt and answer


def replay_command(
    answer_id: Annotated[str, typer.Argument(metavar="ID", help="The id of an answer, as its chunks and the log have it.")],
    journal: Annotated[Path, typer.Option("--journal", help="The file that the server wrote.")],
) -> None:
    """Compute a journalled request again and say whether the bits match; exit code 1 if not."""
    if not journal.exists():
        raise StartError(f"there is no journal {journal}")
    check_file(journal)
    record = load(journal, answer_id)
    if record is None:
        raise StartError(f"the journal {journal} has no answer {answer_id!r}")
    with reading(journal) as database:
        options = read_options(database)
    engine_args = EngineArgs.from_options({name: value for name, value in options.items() if name in ENGINE_OPTIONS})
    parsers = Parsers(options.get("tool_call_parser", "auto"), options.get("reasoning_parser", "auto"))
    from pagestream.engine import AsyncLLMEngine  # brings torch with it

    engine = AsyncLLMEngine.from_engine_args(engine_args)
    again = asyncio.run(compute(engine, record, ServerSettings(("",), parsers=parsers)))
    raise typer.Exit(tell(record, again))


async def compute(engine: AsyncLLMEngine, record: JournalledAnswer, settings: ServerSettings) -> Tokens:
    """All tokens from the prompt on, with the seeds that were drawn; nothing of the journal's own tokens is used."""
    await engine.start()
    answer = await rebuild(record, engine, settings)
    found: Tokens = {}
    try:
        streams = await engine.add_requests(
            record.id,
            [request.prompt_token_ids for request in record.requests],
            answer.params,
            begun=[Begun(request.seed) for request in record.requests],
        )
        for place, stream in enumerate(streams):
            async for output in stream:
                for new in output.outputs:
                    found[place, new.index] = found.get((place, new.index), ()) + new.token_ids
    finally:
        await engine.stop()
    return found


def tell(record: JournalledAnswer, again: Tokens) -> int:
    num_compared = 0
    for place, request in enumerate(record.requests):
        is_whole = request.finish_reason in (FinishReason.STOP.value, FinishReason.LENGTH.value)
        for index, token_ids in sorted(request.token_ids.items()):
            new = again.get((place, index), ())
            new = new if is_whole else new[: len(token_ids)]
            if new != token_ids:
                at = next((at for at, pair in enumerate(zip(token_ids, new, strict=False)) if pair[0] != pair[1]), None)
                where = f"at token {at}" if at is not None else f"in length: {len(token_ids)} then, {len(new)} now"
                print(f"{record.id}: answer {index} of prompt {place} differs {where}")
                return 1
            num_compared += len(token_ids)
    print(f"{record.id}: the bits match; tokens compared: {num_compared}")
    return 0
