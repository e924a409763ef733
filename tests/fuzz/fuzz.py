"""Fuzz the parsers: ``python tests/fuzz/fuzz.py [--seconds 60] [target …]``. `make fuzz` runs it.

With atheris installed (``pip install atheris``), coverage guides the fuzzing, each target runs in its own process, and a
target that takes more than 512 MB of memory fails. Without atheris, this process mutates the seeds at random. Inputs that
crash a target are written to the current folder. Move them to tests/fuzz/seeds/TARGET, where
`tests/fuzz/test_seeds.py` keeps testing them.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]


def guided(name: str, seconds: float) -> int:
    """Fuzz one target with atheris in a separate process, because atheris ends its process; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        from targets import SEEDS

        for number, seed in enumerate(SEEDS[name]):
            (Path(folder) / f"seed-{number}").write_bytes(seed)
        known = HERE / "seeds" / name
        command = [sys.executable, __file__, "--guided", name, folder, *([str(known)] if known.is_dir() else [])]
        command += [f"-max_total_time={seconds:.0f}", "-rss_limit_mb=512", "-max_len=4096", "-timeout=10"]
        return subprocess.run(command, check=False).returncode


def be_guided(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["asyncdist"]):
        from targets import TARGETS

    atheris.Setup([sys.argv[0], *arguments], TARGETS[name])
    atheris.Fuzz()


def blind(name: str, seconds: float) -> int:
    """Mutate the seeds at random; return the number of inputs tried."""
    from targets import SEEDS, TARGETS

    chance, until, count = random.Random(), time.monotonic() + seconds, 0
    pool = [bytearray(seed) for seed in SEEDS[name]]
    while time.monotonic() < until:
        data = bytearray(chance.choice(pool))
        for _ in range(chance.randrange(1, 8)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([chance.randrange(256)])
                case 1:
                    data[at:at] = chance.randbytes(chance.randrange(9))
                case 2:
                    del data[at : at + chance.randrange(9)]
                case 3:
                    other = chance.choice(pool)
                    data[at:] = other[chance.randrange(len(other)) :]
        try:
            TARGETS[name](bytes(data))
        except BaseException:
            Path(f"crash-{name}").write_bytes(data)
            print(f"{name}: wrote the input that crashes it to crash-{name}")
            raise
        count += 1
    return count


def main() -> int:
    if sys.argv[1:2] == ["--guided"]:
        be_guided(sys.argv[2], sys.argv[3:])
        return 0
    from targets import TARGETS

    parser = argparse.ArgumentParser(description="Fuzz the parsers of asyncdist.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    given = parser.parse_args()
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("no atheris here: mutating the seeds at random")
        for name in given.targets:
            print(f"{name}: {blind(name, given.seconds)} inputs")
        return 0
    return max(guided(name, given.seconds) for name in given.targets)


if __name__ == "__main__":
    sys.exit(main())
