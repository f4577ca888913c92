#!/usr/bin/env bash
# Runs this server and its peers side by side on one machine, in alternating rounds, and prints one table with ratios.
#   tests/bench/compare.sh OURS=http://127.0.0.1:8000/v1 PEER=http://127.0.0.1:8101/v1 … [-- load options]
# Every server must already be running, on loopback; only one is loaded at a time.  The ratios are the first one's to each other.
# Options behind -- go to `pagestream bench serve`:
#   --workload chat|prefill|shared|long --concurrency 8 --concurrency 32 --rounds 3 --json FILE --plot FILE
# LOAD_CLIENT names a client script of your own instead, which gets --server NAME=URL for each.
set -euo pipefail

servers=() options=()
while [ $# -gt 0 ]; do
  case "$1" in
  --) shift; options=("$@"); break ;;
  *=http://127.0.0.1:*/v1 | *=http://localhost:*/v1) servers+=("$1"); shift ;;
  *) echo "compare.sh: $1 is not NAME=http://127.0.0.1:PORT/v1" >&2; exit 2 ;;
  esac
done
[ ${#servers[@]} -gt 0 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }

if [ -n "${LOAD_CLIENT:-}" ]; then
  exec python3 "$LOAD_CLIENT" "${servers[@]/#/--server=}" "${options[@]}"
fi
exec ${PAGESTREAM:-pagestream} bench serve "${servers[@]}" "${options[@]}"
