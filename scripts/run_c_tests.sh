#!/bin/sh
# SPDX-License-Identifier: MIT
#
# usage: run_c_tests.sh SECONDS WRAPPER PROGRAM...
# Runs each program with a time limit, under WRAPPER (may be empty), as many at a time as there are
# processors (JOBS=n overrides); prints a program's output when it exits. A program exits with 0 if
# it passed, 77 if it cannot run on this machine (it says why), and any other status if it failed.
# This script exits with 1 if any program failed. Tests print their own counts of passed and failed
# checks; with COUNT=1 programs are counted instead.

# Run a program: leave its result in $results, without mixing the output of concurrent programs.
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
