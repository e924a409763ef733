"""``python -m benchmarks``."""

from __future__ import annotations

from importlib import import_module

import click

from asyncdist.cli import SETTINGS_OF_HELP, ReportingGroup
from benchmarks.benchmark import Benchmark

CLASSES = {
    "ddp": "DdpBenchmark",
    "devices": "DevicesBenchmark",
    "faults": "FaultsBenchmark",
    "idle": "IdleBenchmark",
    "rpc": "RpcBenchmark",
    "scale": "ScaleBenchmark",
    "store": "StoreBenchmark",
    "weights": "WeightsBenchmark",
}


class _Benchmarks(ReportingGroup):
    """Imports only the benchmark that runs: that of the store does without torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(CLASSES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in CLASSES:
            return None
        kind: type[Benchmark[object]] = getattr(import_module(f"benchmarks.{name}.benchmark"), CLASSES[name])
        return kind.command(name)


@click.group(cls=_Benchmarks, context_settings=SETTINGS_OF_HELP)
def main() -> None:
    """The benchmarks of the repository. `asyncdist bench` measures collectives.

    A benchmark shows a table, and with --output writes it and all figures into a folder: docs/bench has those of the
    documentation.
    """


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
