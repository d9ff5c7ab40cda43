#!/usr/bin/env bash
# A plain loop: start a job again while it can be resumed, for example after a full disk.
#
#   nohup examples/cluster/loop.sh &
#
# Ctrl-C ends the job with 130, and with it the loop.
set -uo pipefail

code=75
while [ "$code" -eq 75 ]; do
    noria batch -i in.jsonl -o out.jsonl --model MODEL
    code=$?
    # a full disk or a lost host is not back at once
    [ "$code" -ne 75 ] || sleep "${PAUSE:-60}"
done
exit "$code"
