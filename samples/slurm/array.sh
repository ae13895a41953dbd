#!/bin/bash
#
# One job in eight tasks that may be preempted and requeued as often as it takes:
#
#     sbatch samples/slurm/array.sh prompts.jsonl -o out -m MODEL
#
# All arguments go to `cbatch run`, which finds out by itself which rows are this task's and when its time is over.
#
#SBATCH --job-name=cbatch
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=cbatch-%A_%a.log
# For a GPU in each task: #SBATCH --gres=gpu:1

srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}" cbatch run "$@" --grace 120
code=$?

# 75: out of time or preempted, and everything finished is on disk. The next start of this task goes on from there.
if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
