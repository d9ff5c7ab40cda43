#!/usr/bin/env bash
# Replicas under Slurm: every task of the array answers a part of the rows on a node of its own.
#
#   job=$(sbatch --parsable examples/cluster/slurm_replicas.sh)
#   sbatch --dependency="afterok:$job" --wrap 'noria merge part*.jsonl -o out.jsonl'
#
# A task that Slurm stops, or that runs out of time, is queued again and goes on where it was.
#SBATCH --job-name=noria
#SBATCH --array=0-7
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
set -uo pipefail

srun noria batch -i in.jsonl -o "part$SLURM_ARRAY_TASK_ID.jsonl" --model MODEL --dtype bfloat16 \
    --rows "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
# with 1 the part is complete, and some of its rows are errors
[ "$code" -eq 1 ] || exit "$code"
