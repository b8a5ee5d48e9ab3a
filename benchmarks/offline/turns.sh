#!/usr/bin/env bash
# turns.sh OLD COMMIT SHAPE [TURNS] [K] [rounds|calls]: the checkout OLD, which is COMMIT, and this one on one GPU, in turn.
# See setup.sh for CARRY and OUT; turns.py lies beside OLD's packages, whatever OLD has.
. "$(dirname "$0")/setup.sh"
old=$1 commit=$2 shape=$3 turns=${4:-7} k=${5:-3} what=${6:-rounds}
cp "$(dirname "$0")/turns.py" "$old/benchmarks/offline/turns.py"
for name in old new; do
  tree=$PWD
  [ $name = new ] || tree=$old
  (cd "$tree" && PYTHONPATH=$tree:$site python3 -m benchmarks.offline.in_turn benchmarks.offline.turns $name "$shape" "$k" "$what" \
    >"$OUT/$name.log" 2>&1) &
done
there() { for _ in $(seq "$2"); do [ -f "$held/$1" ] && return; sleep 0.1; done; say "no $1"; }
there old.ready 2500 && there new.ready 2500
for turn in $(seq "$turns"); do
  order="old new"
  [ $((turn % 2)) = 1 ] || order="new old"
  for name in $order; do touch "$held/$name.$turn" && there "$name.$turn.done" 300; done
done
touch "$held/old.end" "$held/new.end"
python3 -m benchmarks.offline.turns --compare "$OUT/old.log" "$OUT/new.log" "$commit" "$OUT/turns.jsonl"
