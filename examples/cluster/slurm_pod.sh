#!/usr/bin/env bash
# A pod under Slurm: one model over the devices of two nodes, with one process on each.
#
#   sbatch examples/cluster/slurm_pod.sh
#
# The folder must be on a disk that all nodes share: the journal has to be there after a restart.
#SBATCH --job-name=noria-pod
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
set -uo pipefail

srun noria batch -i in.jsonl -o out.jsonl --model MODEL --plan plan.toml --distributed auto
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
[ "$code" -eq 1 ] || exit "$code"
