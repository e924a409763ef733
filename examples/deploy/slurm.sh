#!/bin/bash
# Two hosts with four ranks each:  sbatch examples/deploy/slurm.sh train.py [its arguments]
# Each rank learns from srun which one it is; the program just calls init_process_group().
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
set -euo pipefail

# Where rank 0 is, and a secret by which the ranks know one another; srun passes both on to all hosts.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs that share a host get ports of their own, below those that a kernel gives to whoever asks for any.
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12768))
ASYNCDIST_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')
export MASTER_ADDR MASTER_PORT ASYNCDIST_TOKEN
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

exec srun --kill-on-bad-exit=1 python "$@"
