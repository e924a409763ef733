#!/usr/bin/env bash
# One would guess: float8_e4m3fn and float8_e8m0fnu mean the same numbers in torch and in ml_dtypes (JAX, TensorStore), so tensors
# converted by either agree.
# torch 2.13.0, ml_dtypes 0.5.3: for e4m3fn, torch maps inf and all that is above the largest value to 448, ml_dtypes to NaN; for e8m0fnu,
# which has no sign and no zero, torch maps -2 to 2 and 0 to the smallest value, ml_dtypes both to NaN. e5m2 has inf, and they agree.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 ml_dtypes==0.5.3 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
float8_e4m3fn inf: torch 448.0, ml_dtypes nan
float8_e4m3fn 1000.0: torch 448.0, ml_dtypes nan
float8_e4m3fn 464.0: torch 448.0, ml_dtypes 448.0
float8_e8m0fnu -2.0: torch 2.0, ml_dtypes nan
float8_e8m0fnu 0.0: torch 5.877471754111438e-39, ml_dtypes nan
float8_e8m0fnu 3.0: torch 4.0, ml_dtypes 4.0
float8_e5m2 inf: torch inf, ml_dtypes inf
float8_e5m2 1000.0: torch 1024.0, ml_dtypes 1024.0
OUT
cat > program.py <<'PY'
import ml_dtypes
import numpy
import torch

CASES = {
    "float8_e4m3fn": (float("inf"), 1000.0, 464.0),
    "float8_e8m0fnu": (-2.0, 0.0, 3.0),
    "float8_e5m2": (float("inf"), 1000.0),
}
for name, values in CASES.items():
    for value in values:
        by_torch = torch.tensor(value).to(getattr(torch, name)).item()
        by_ml_dtypes = float(numpy.array(value, dtype=numpy.float32).astype(getattr(ml_dtypes, name)))
        print(f"{name} {value}: torch {by_torch}, ml_dtypes {by_ml_dtypes}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
