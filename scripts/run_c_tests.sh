#!/bin/sh
# SPDX-License-Identifier: MIT
#
# usage: run_c_tests.sh SECONDS WRAPPER PROGRAM...
#
# Runs each program with a time limit, under WRAPPER (may be empty). Exit status of a program: 0 passed,
# 77 could not be run here (it says why), anything else failed. Status of this script: 1 if any failed.
# A test says itself how many checks passed and failed; with COUNT=1 the programs are counted instead.
limit=$1
wrapper=$2
shift 2
passed=0
failed=0
for program in "$@"; do
  echo "== ${program##*/}"
  # The wrapper is a command with arguments, or nothing: it has to be split.
  # shellcheck disable=SC2086
  timeout -k 5 "$limit" $wrapper "$program" </dev/null
  status=$?
  case $status in
    0) passed=$((passed + 1)) ;;
    77) echo "${program##*/}: not run here" ;;
    124 | 137)
      echo "${program##*/}: FAILED, still running after $limit s"
      failed=$((failed + 1))
      ;;
    *)
      echo "${program##*/}: FAILED, exit status $status"
      failed=$((failed + 1))
      ;;
  esac
done
if [ -n "${COUNT:-}" ]; then
  echo "$passed passed, $failed failed"
fi
[ "$failed" -eq 0 ]
