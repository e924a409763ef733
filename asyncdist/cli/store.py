"""``asyncdist store``: the store as a daemon."""

from __future__ import annotations

import click


@click.command(short_help="Serve a rendezvous store that outlives every worker.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address or name to listen on; '' is everywhere.")
@click.option("--port", default=29500, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free port.")
@click.option(
    "--allow-unauthenticated-c10d",
    is_flag=True,
    help="Take clients of torch's TCPStore, which have no token, from other machines too.",
)
def store(host: str, port: int, allow_unauthenticated_c10d: bool) -> None:
    """Serve a rendezvous store until SIGTERM or Ctrl-C.

    Ranks meet in it, and workers may come and go while it stays. One line says when clients can connect. Beyond
    loopback it wants the job's token in ASYNCDIST_TOKEN; a secret does not belong on a command line.

    Programs that know nothing of us use it as well: it speaks the format of torch's TCPStore on the same port. That
    format has no authentication, so such clients are taken from this machine only, unless you allow others.

    \b
    ASYNCDIST_TOKEN=… asyncdist store --host 10.0.0.5 --port 29500
    ASYNCDIST_TOKEN=… python train.py        # init_process_group(store=TCPStore("10.0.0.5", 29500), …)
    torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29500 --rdzv-conf is_host=0 … train.py

    Exits with 0 when told to stop, and with 2 when it cannot listen there: the port is in use, the host does not
    resolve, or it would be open to anyone.
    """
    import asyncio

    from asyncdist.cli.screen import configured
    from asyncdist.runtime import new_loop
    from asyncdist.store import serve

    config = configured()
    if allow_unauthenticated_c10d:
        config = config.with_(allow_unauthenticated_c10d=True)

    def ready(at: str, chosen: int) -> None:
        shown = f"[{at}]" if ":" in at else at or "*"
        guard = "token wanted" if config.token else "no token wanted"
        click.echo(f"asyncdist store is ready at tcp://{shown}:{chosen} ({guard})")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(host, port, token=config.token, config=config, ready=ready))
