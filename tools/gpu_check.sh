#!/usr/bin/env bash
# Tries the device layer on a machine with a GPU: a bare one with PyTorch for CUDA, NumPy, CMake and g++, where nothing
# is installed and no network is needed. Takes 8 minutes at most on 16 cores. A stage that fails or takes too long does
# not stop the next. The report is ${OUT:-.}/gpu_check.txt, and is also printed.
#
#   OUT=/tmp/out tools/gpu_check.sh                     # everything
#   OUT=/tmp/out tools/gpu_check.sh build native        # some of the stages below
#   GPU_CHECK_GTEST=/usr/src/googletest                 # GoogleTest's sources, where its package is not installed
#   GPU_CHECK_DEVICE=cpu GPU_CHECK_SLOWNESS=5           # a rehearsal without a GPU, on a slow machine
set -u
{ # bash reads a block as a whole, so the file may be edited while it runs
cd "$(dirname "$0")/.."
out=$(realpath "${OUT:-.}")
build=${GPU_CHECK_BUILD:-$PWD/build/gpu_check}
report=$out/gpu_check.txt
python=${PYTHON:-python3}
limit=$((470 * ${GPU_CHECK_SLOWNESS:-1})) # total seconds of all stages
mkdir -p "$build"
chosen=" $* "
: > "$report"
exec > >(tee -a "$report") 2>&1

# stage NAME SECONDS COMMAND...: runs the command, shows its output, and reports how it ended.
stage() {
  local name=$1 seconds=$(($2 * ${GPU_CHECK_SLOWNESS:-1})) left=$((limit - SECONDS))
  shift 2
  if [[ "$chosen" != "  " && "$chosen" != *" $name "* ]]; then return; fi
  ((seconds < left)) || seconds=$left
  echo "==== $name (at $SECONDS s, at most $seconds s)"
  if ((seconds < 5)); then
    echo "==== $name: NOT RUN, no time left"
    return
  fi
  timeout -k 5 "$seconds" "$@" < /dev/null
  local code=$?
  case $code in
    0) echo "==== $name: passed" ;;
    124 | 137) echo "==== $name: FAILED, took longer than $seconds s" ;;
    *) echo "==== $name: FAILED with code $code" ;;
  esac
}

environment() {
  date
  nvidia-smi || true
  lscpu | grep -E 'Model name|^CPU\(s\)'
  g++ --version | head -1
  cmake --version | head -1
  "$python" - << 'END'
import sys, torch, numpy
print(sys.version, "torch", torch.__version__, "numpy", numpy.__version__)
print("cuda", torch.version.cuda, "nccl", torch.cuda.nccl.version(), torch.cuda.get_device_name(0))
END
}

build() {
  local generator=() tests=OFF gtest=()
  command -v ninja > /dev/null && generator=(-G Ninja)
  local sources=${GPU_CHECK_GTEST:-build/googletest}
  if [[ -d $sources ]]; then
    tests=ON gtest=("-DKERAS_DDL_GTEST_SOURCES=$(realpath "$sources")")
  elif ls /usr/include/gtest/gtest.h /usr/lib/*/cmake/GTest > /dev/null 2>&1; then
    tests=ON
  else
    echo "no GoogleTest: the native tests are not built"
  fi
  cmake -S native -B "$build/native" "${generator[@]}" -DKERAS_DDL_MPI=OFF -DKERAS_DDL_TF=OFF -DKERAS_DDL_UNITY=ON \
    -DKERAS_DDL_TESTS=$tests "${gtest[@]}" > "$build/cmake.log" 2>&1 || { tail -30 "$build/cmake.log"; return 1; }
  local targets=(keras_ddl_core keras_ddl_cuda)
  cmake --build "$build/native" -j "$(nproc)" --target "${targets[@]}" > "$build/build.log" 2>&1 ||
    { tail -40 "$build/build.log"; return 1; }
  lay_out
  [[ $tests == OFF ]] && return
  cmake --build "$build/native" -j "$(nproc)" --target device_test > "$build/tests.log" 2>&1 ||
    { tail -40 "$build/tests.log"; return 1; }
}

# The package as pip would install it, made of links.
lay_out() {
  rm -rf "$build/site"
  mkdir -p "$build/site/keras_ddl"
  local folder
  for folder in keras_ddl/* integrations/* observe/* export serving; do
    case ${folder##*/} in __pycache__ | README.md) ;; *) ln -s "$PWD/$folder" "$build/site/keras_ddl/" ;; esac
  done
  ln -s "$build"/native/core/libkeras_ddl.so "$build"/native/cuda/libkeras_ddl_cuda.so "$build/site/keras_ddl/"
}

# Prints where the loader finds NCCL: in PyTorch's wheel.
nccl_folder() {
  "$python" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2> /dev/null
}

# Compares the declarations in native/cuda/functions.h with NVIDIA's headers, if they are installed.
headers() {
  local cuda nccl
  cuda=$(ls -d /usr/local/cuda/include "${CUDA_HOME:-/none}/include" 2> /dev/null | head -1)
  nccl=$("$python" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/include")' 2> /dev/null)
  [[ -f $nccl/nccl.h ]] || nccl=/usr/include
  [[ -f $cuda/cuda.h && -f $nccl/nccl.h ]] || { echo "no cuda.h or nccl.h: not compared"; return; }
  g++ -std=c++17 -fsyntax-only -I "$cuda" -I "$nccl" -I native/cuda -I native/core/include native/tests/device/headers_test.cc &&
    echo "the declarations agree with $cuda/cuda.h and $nccl/nccl.h"
}

native() {
  LD_LIBRARY_PATH=$(nccl_folder):${LD_LIBRARY_PATH:-} "$build/native/tests/device_test" --gtest_brief=0 2>&1 |
    grep -vE '^\[ RUN|^$' | tail -60
  return "${PIPESTATUS[0]}"
}

# For the ranks: nothing of keras_ddl's packages on the host.
# build/gpu_check_packages/: links or copies of packages that `keras-ddl run` imports and the machine may lack (click).
export PYTHONPATH=$build/site:$PWD/tests:$PWD/build/gpu_check_packages PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
checks() { "$python" tools/gpu_check/checks.py "$@"; }
ddl_run() { "$python" -m keras_ddl.cli run "$@"; }

part=integrations/torch/tests

export -f environment build lay_out headers native nccl_folder checks ddl_run
export build python
run() { stage "$1" "$2" bash -c "set -u; ${3}"; }

run environment 30 environment
run build 150 build
run headers 20 headers
run native 90 native
run import 30 '"$python" -c "
import sys, keras_ddl.torch
print(\"keras_ddl.torch is imported without\", \"TensorFlow\" if \"tensorflow\" not in sys.modules else \"?\")"'
run numpy 60 'ddl_run -np 2 "$python" tools/gpu_check/against_numpy.py'
run numpy_nccl_of_one 40 'KERAS_DDL_DEVICE=nccl ddl_run -np 1 "$python" tools/gpu_check/against_numpy.py'
run numpy_nccl_of_two 40 'NCCL_MULTI_RANK_GPU_ENABLE=1 KERAS_DDL_DEVICE=nccl ddl_run -np 2 "$python" tools/gpu_check/against_numpy.py ||
  { echo "this version of NCCL takes one rank per GPU, or it failed"; exit 1; }'
run collectives 80 "checks -np 2 $part/collective_checks.py"
run training 80 "checks -np 2 $part/training_checks.py check_timeline_shows_reductions_during_the_backward_pass"
run killed_rank 40 '"$python" tools/gpu_check/killed_rank.py'
run speed 90 '"$python" tools/gpu_check/speed.py'
run contract 60 "checks -np 2 $part/contract_checks.py"
echo "==== end, at $SECONDS s"
grep -aE '^==== .*: (passed|FAILED|NOT RUN)' "$report"
sleep 1 # for tee
! grep -qaE '^==== .*: (FAILED|NOT RUN)' "$report"
exit
}
