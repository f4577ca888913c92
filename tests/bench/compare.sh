#!/usr/bin/env bash
# Runs this server and its peers side by side on one machine, in alternating rounds, and prints one table with ratios.
#   tests/bench/compare.sh OURS=http://127.0.0.1:8000/v1 PEER=http://127.0.0.1:8101/v1 … [-- load options]
# Every server must already be running, on loopback, with the model named "m"; only one is loaded at a time.
# Options behind -- go to the load client: --workload chat|prefill|shared|long --concurrency 1 8 32 --rounds 3 --json FILE
# LOAD_CLIENT names a client script of your own; without it `pagestream bench serve` measures one server after another.
set -euo pipefail

servers=() options=()
while [ $# -gt 0 ]; do
  case "$1" in
  --) shift; options=("$@"); break ;;
  *=http://127.0.0.1:*/v1 | *=http://localhost:*/v1) servers+=("$1"); shift ;;
  *) echo "compare.sh: $1 is not NAME=http://127.0.0.1:PORT/v1" >&2; exit 2 ;;
  esac
done
[ ${#servers[@]} -gt 0 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }

for server in "${servers[@]}"; do
  curl -sf -o /dev/null "${server#*=}/models" || { echo "compare.sh: ${server#*=} does not answer" >&2; exit 1; }
done

if [ -n "${LOAD_CLIENT:-}" ]; then
  exec python3 "$LOAD_CLIENT" "${servers[@]/#/--server=}" "${options[@]}"
fi
for server in "${servers[@]}"; do
  echo "== ${server%%=*}"
  pagestream bench serve "${server#*=}" --model m "${options[@]}"
done
