#!/bin/sh
# SPDX-License-Identifier: MIT
#
# usage: run_c_tests.sh SECONDS WRAPPER PROGRAM...
#
# Runs each program with a time limit, under WRAPPER (may be empty). Exit status of a program: 0 passed,
# 77 could not be run here (it says why), anything else failed. Status of this script: 1 if any failed.
limit=$1
wrapper=$2
shift 2
failed=0
for program in "$@"; do
  echo "== ${program##*/}"
  # The wrapper is a command with arguments, or nothing: it has to be split.
  # shellcheck disable=SC2086
  timeout -k 5 "$limit" $wrapper "$program" </dev/null
  status=$?
  case $status in
    0) ;;
    77) echo "${program##*/}: not run here" ;;
    124 | 137) echo "${program##*/}: FAILED, still running after $limit s"; failed=1 ;;
    *) echo "${program##*/}: FAILED, exit status $status"; failed=1 ;;
  esac
done
exit $failed
