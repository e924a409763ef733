#!/usr/bin/env bash
# One would guess: a SUM of booleans is a logical or, so what is True on every rank stays True.
# torch 2.13.0, gloo: the bytes are added. A tensor that holds True on both ranks holds a byte of 2 after one all_reduce, and still
# reads as True; after eight of them the byte has overflowed to 0, and the tensor reads False. No error is raised.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
rank 0: [2, 4, 8, 16, 32, 64, 128, 0] False
rank 1: [2, 4, 8, 16, 32, 64, 128, 0] False
OUT
run_ranks <<'PY'
import torch
import torch.distributed as dist


def main(rank):
    flag = torch.ones(1, dtype=torch.bool)
    stored = []
    for _ in range(8):
        dist.all_reduce(flag)
        stored.append(flag.view(torch.uint8).item())
    return f"{stored} {flag.item()}"
PY
