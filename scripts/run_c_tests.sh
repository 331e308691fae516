#!/bin/sh
# SPDX-License-Identifier: MIT
#
# usage: run_c_tests.sh SECONDS WRAPPER PROGRAM...
# Runs each program with a time limit, under WRAPPER (may be empty), one per processor at a time
# (JOBS=n overrides); prints a program's output when it ends. Exit status of a program: 0 passed, 77
# could not be run here (it says why), anything else failed. Status of this script: 1 if any failed.
# A test prints its own counts of passed and failed checks; with COUNT=1 programs are counted
# instead.

# Run one program: leaves a file in $results, and keeps the output of concurrent programs apart.
run_one() {
  name=${program##*/}
  said=$results/$name.out
  echo "== $name" >"$said"
  # The wrapper is a command with arguments, or empty: let the shell split it.
  # shellcheck disable=SC2086
  timeout -k 5 "$limit" $wrapper "$program" </dev/null >>"$said" 2>&1
  status=$?
  case $status in
    0) touch "$results/$name.passed" ;;
    77) echo "$name: not run here" >>"$said" ;;
    124 | 137) echo "$name: FAILED, still running after $limit s" >>"$said" ;;
    *) echo "$name: FAILED, exit status $status" >>"$said" ;;
  esac
  case $status in
    0 | 77) ;;
    *) touch "$results/$name.failed" ;;
  esac
  flock "$results" cat "$said"
}

limit=$1
wrapper=$2
shift 2
if [ -n "${RUN_ONE_INTO:-}" ]; then
  results=$RUN_ONE_INTO
  program=$1
  run_one
  exit 0
fi
results=$(mktemp -d) || exit 1
trap 'rm -rf "$results"' EXIT
printf '%s\0' "$@" |
  RUN_ONE_INTO="$results" xargs -0 -n 1 -P "${JOBS:-$(nproc)}" sh "$0" "$limit" "$wrapper"
count() {
  find "$results" -name "*.$1" | wc -l
}
failed=$(count failed)
if [ -n "${COUNT:-}" ]; then
  echo "$(count passed) passed, $failed failed"
fi
[ "$failed" -eq 0 ] && [ "$(find "$results" -name '*.out' | wc -l)" -eq $# ]
