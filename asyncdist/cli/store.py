"""``asyncdist store``: run the store as a daemon, or send a command to a running one."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from asyncdist.cli.option_types import Seconds, SocketFile
from asyncdist.cli.store_commands import STORE_COMMANDS, StoreTarget
from asyncdist.config import Config, whole_number


def _number_of_bytes(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of bytes: write 1000000, 64M or 4G") from None


class JsonFormatter(logging.Formatter):
    """Writes ``{"time": …, "level": …, "logger": …, "pid": …, "message": …}``, and a traceback as ``"error"``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _log_to_stderr(form: str, level: str) -> None:
    """Write the records that asyncdist logs at ``level`` or above to the standard error, as text or JSON lines."""
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logger = logging.getLogger("asyncdist")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


@click.group(
    invoke_without_command=True, short_help="Run a store at which ranks meet and which outlives them, or query one."
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address or host name to listen on; '' means all interfaces."
)
@click.option(
    "--port",
    default=29500,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--unix",
    type=SocketFile(dir_okay=False),
    help="Unix socket file to listen on; without --host and --port, the store listens only there.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder in which the store's data survives restarts.",
)
@click.option(
    "--fsync",
    type=click.Choice(["always", "interval", "never"]),
    default="always",
    show_default=True,
    help="When to flush changes to disk: before each reply, once a second, or when the kernel decides.",
)
@click.option(
    "--max-memory",
    type=_number_of_bytes,
    metavar="BYTES",
    help="Most memory for keys, values and queues together, for example 4G.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="HTTP port for /metrics (Prometheus) and /healthz on the same host.",
)
@click.option(
    "--drain",
    default=5.0,
    show_default=True,
    type=Seconds(),
    help="Seconds for sending the remaining replies at shutdown.",
)
@click.option("--tls-cert", help="Certificate file (PEM); enables TLS.  [env: ASYNCDIST_TLS_CERT]")
@click.option("--tls-key", help="Private key file of the certificate.  [env: ASYNCDIST_TLS_KEY]")
@click.option("--tls-ca", help="CA file that client certificates must verify against.  [env: ASYNCDIST_TLS_CA]")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Text lines or JSON objects.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="Lowest level to log.",
)
@click.option(
    "--c10d",
    type=click.Choice(["off", "loopback", "any"]),
    help="From where to accept clients of torch's TCPStore, which do not authenticate. Default: off with a token or TLS, "
    "else loopback.  [env: ASYNCDIST_STORE_C10D]",
)
@click.option("--allow-unauthenticated-c10d", is_flag=True, hidden=True, help="Deprecated: --c10d any.")
@click.pass_context
def store(ctx: click.Context, /, **given: Any) -> None:
    """Run a store until SIGTERM or Ctrl-C; or, with a command, query a running store.

    Ranks meet at the store, and it outlives them. It prints one line when clients can connect. A store that listens
    beyond loopback requires the job's token in ASYNCDIST_TOKEN; other users could read it on a command line. Several
    jobs can share one store: each uses its own name in asyncdist://host:port/name.

    Programs without asyncdist can use the store too: it speaks the wire format of torch's TCPStore on the same port.
    That format has no authentication, so a store with a token or TLS accepts such clients only if --c10d allows it.

    \b
    ASYNCDIST_TOKEN=… asyncdist store --host 10.0.0.5 --port 29500 --data /var/lib/asyncdist
    ASYNCDIST_TOKEN=… python train.py        # init_process_group(store=TCPStore("10.0.0.5", 29500), …)
    torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29500 --rdzv-id=a-new-one … train.py
    asyncdist store --port 29500 status

    After a signal to stop, the store accepts no more connections, sends the remaining replies, and exits with status 0.
    It exits with 2 if it cannot start: the port is in use, the host name does not resolve, a token is missing, or the
    data is damaged. It exits with 1 if it can no longer write its data.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_server_options(ctx)
        ctx.obj = StoreTarget(given["host"], given["port"], given["unix"], _tls(given))
        return
    _log_to_stderr(given["log_format"], given["log_level"])
    _serve(ctx, given)


for _command in STORE_COMMANDS:
    store.add_command(_command)


def _refuse_server_options(ctx: click.Context) -> None:
    """Refuse options that configure a daemon if a command follows that queries one."""
    for name in _explicit(ctx) - {"host", "port", "unix", "tls_cert", "tls_key", "tls_ca"}:
        option = "--" + name.replace("_", "-")
        raise click.UsageError(
            f"{option} applies only to serving: {ctx.invoked_subcommand} takes --host, --port and --unix", ctx
        )


def _explicit(ctx: click.Context) -> set[str]:
    """Return the names of the options that are on the command line."""
    return {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def _tls(given: dict[str, Any]) -> dict[str, str]:
    return {name: given[name] for name in ("tls_cert", "tls_key", "tls_ca") if given[name] is not None}


def _settings(given: dict[str, Any]) -> Config:
    from asyncdist.config import Config

    config = Config.from_environment().with_(**_tls(given))
    if given["allow_unauthenticated_c10d"]:
        logging.getLogger("asyncdist").warning("--allow-unauthenticated-c10d is deprecated: write --c10d any")
        config = config.with_(store_c10d="any")
    if given["c10d"] is not None:
        config = config.with_(store_c10d=given["c10d"])
    if given["max_memory"] is not None:
        config = config.with_(store_max_nbytes=given["max_memory"])
    return config


def _serve(ctx: click.Context, given: dict[str, Any]) -> None:
    import asyncio

    from asyncdist.base.background_loop import new_loop
    from asyncdist.environment import Service
    from asyncdist.errors import JournalError
    from asyncdist.store.persistence.group_commit import Fsync
    from asyncdist.store.server.daemon import Options, serve

    config = _settings(given)
    is_ready = False

    def ready(host: str, port: int) -> None:
        nonlocal is_ready
        is_ready = True
        token = "token required" if config.token else "no token required"
        click.echo(f"asyncdist store is ready at {_url(host, port)} ({token})")

    options = Options(
        unix=given["unix"],
        data=given["data"],
        fsync=Fsync(given["fsync"]),
        metrics_port=given["metrics_port"],
        drain_timeout=given["drain"],
        service=Service.from_environment(),
        own_process=True,
    )
    only_unix = given["unix"] is not None and not _explicit(ctx) & {"host", "port"}
    host = None if only_unix else given["host"]
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve(host, given["port"], token=config.token, config=config, ready=ready, options=options))
    except JournalError as error:
        if not is_ready:
            raise
        raise click.ClickException(str(error)) from error  # exits with 1


def _url(host: str, port: int) -> str:
    """Return the URL of a listening socket; with port 0, ``host`` is the path of a Unix socket."""
    if not port:
        return f"unix://{host}"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host or '*'}:{port}"
