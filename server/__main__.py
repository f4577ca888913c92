"""How the `pagestream` command begins and ends; what it can do stands in `command_line`."""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import FrameType

# Without the name of a file, and still nothing that a traceback would explain.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = 130


def main() -> None:
    """What the command ends with; 2 and one line for what the operator can mend, 130 after Ctrl-C, 1 where nobody reads on."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not what somebody wants ignored
    if is_ours:
        signal.signal(signal.SIGINT, leave)
    if os.getpid() == 1:  # the first process of a container has no default handlers: a stop while a model loads would go unheard
        signal.signal(signal.SIGTERM, leave)
    from pagestream.engine import ClientError, StartError
    from pagestream.server.command_line import Abort, UsageError, cli  # takes a second, in which Ctrl-C would be a traceback

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = cli(standalone_mode=False)
        if sys.stdout is not None:  # which it is where it was closed
            sys.stdout.flush()  # later, nobody could tell what went wrong with it
    except UsageError as error:
        if message := error.format_message():  # type: ignore[attr-defined]
            complain(message)
        code = 2  # without a command, the help was shown and there is nothing to add
    except (StartError, ClientError) as error:  # a load of `bench` may ask for more than the model can
        complain(str(error))
    except (KeyboardInterrupt, Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        code = 1
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        complain(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
    if code == INTERRUPTED:
        print("pagestream: interrupted", file=sys.stderr)
    sys.exit(code)


def leave(number: int, frame: FrameType | None) -> None:
    """Nothing has begun that would have to be ended."""
    os.write(2, b"pagestream: interrupted\n")
    os._exit(128 + number)


def complain(message: str) -> None:
    print("pagestream: error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
