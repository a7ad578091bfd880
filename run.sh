#!/usr/bin/env bash
# Sets up .venv on the first call, then runs what is asked. ./run.sh --help lists it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'EOF'
./run.sh                    set up, then compare eager with compiled PPO on HalfCheetah-v5: a table and a picture
./run.sh test [--all]       the test suite; --all adds what is long (learning checks, repeated kills)
./run.sh bench [LINE] [FLAGS]   README's table, ours against Stable-Baselines3 and SBX (installs them first); LINE is
                            PPO, SAC, TD3, DQN or PPO-Atari, by default each in turn; FLAGS are those of compare
./run.sh SCRIPT [FLAGS]     a training script, e.g. ./run.sh ppo_continuous_action_torchcompile --compile
./run.sh gpu [FLAGS]        on a GPU: checks, then the speed of every script in every mode, 500 s a call
./run.sh launch [FLAGS]     a script on several environments with several seeds, here or on SLURM
./run.sh report [--check]   the documents' tables, written from the committed results
./run.sh speedrun TASK      the time that training takes to reach a score, beside the record: cartpole, hopper ...
./run.sh TOOL [FLAGS]       compare, evaluate, plot, ablate, profile, reproduce or plan_layout
./run.sh SCRIPT --help      what a script or tool takes

Environment variables:
  LEANRL_TORCH_INDEX   package index for PyTorch, e.g. https://download.pytorch.org/whl/cpu for a machine without a GPU
                       (by default pip's own index, which on Linux brings the CUDA build)
  PYTHON               the Python (3.11 to 3.13) that makes .venv
EOF
}

die() {
  echo "run.sh: $*" >&2
  exit 2
}

# The first Python for which every package has wheels, in $python.
find_python() {
  set -- python3 python3.13 python3.12 python3.11 python
  for python in "${PYTHON:-$@}"; do
    if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then return; fi
  done
  die "no Python 3.11 to 3.13 found; install one and name it with PYTHON=/path/to/python3 ./run.sh"
}

make_venv() {
  if .venv/bin/python -m pip --version >/dev/null 2>&1; then return; fi
  find_python
  "$python" -c 'import venv, ensurepip' 2>/dev/null || die "$python has no venv module; Debian: apt install python3-venv"
  echo "making .venv with $("$python" --version)"
  # --clear: an earlier call may have been interrupted half-way.
  "$python" -m venv --clear .venv
}

pip_install() {
  local quiet=--quiet
  if [ -t 2 ]; then quiet=--progress-bar=on; fi
  .venv/bin/python -m pip install "$quiet" --disable-pip-version-check "$@" ||
    die "pip could not install $*; a second ./run.sh goes on from here"
}

# install GROUP...: requirements/requirements[-GROUP].txt, once for each version of the files and each folder. Every
# script and tool gets the environments, MuJoCo and EnvPool; what only a flag needs (the Hub, the peers) is named with its
# command where it is missing.
install() {
  local group file stamp want
  make_venv
  for group in "$@"; do
    file=requirements/requirements${group:+-$group}.txt
    stamp=.venv/installed${group:+-$group}
    want="$(cat "$file") index=${LEANRL_TORCH_INDEX:-} in $PWD"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then continue; fi
    echo "installing $file"
    if [ -z "$group" ] && [ -n "${LEANRL_TORCH_INDEX:-}" ]; then
      # Its dependencies come from the same index or, below, from pip's own.
      pip_install --force-reinstall --no-deps --index-url "$LEANRL_TORCH_INDEX" "$(grep '^torch==' "$file")"
    fi
    pip_install -r "$file"
    echo "$want" >"$stamp"
  done
}

# bench LINE [FLAGS]: a line of README's table is one call of compare; FLAGS, those after -- too, come last and win.
bench() {
  local name=$1 script steps peers=(sb3 sbx) fast=() flags=() script_args=()
  case $name in
  PPO) script=ppo_continuous_action steps=24576 ;;
  SAC) script=sac_continuous_action steps=4000 script_args=(--learning-starts 1000) ;;
  TD3) script=td3_continuous_action steps=4000 script_args=(--learning-starts 1000) ;;
  DQN) script=dqn steps=60000 ;;
  PPO-Atari) script=ppo_atari_envpool steps=10240 peers=(sb3) ;;
  *) die "README's table has no line $name; there are PPO, SAC, TD3, DQN and PPO-Atari" ;;
  esac
  case $name in SAC | TD3 | PPO-Atari)
    # On a processor without bf16 units it is slower than float32.
    if .venv/bin/python -c 'import torch
from leanrl.support.devices import has_bf16_units
exit(not (torch.cuda.is_available() or has_bf16_units()))'; then
      fast=("${script}_torchcompile:compile --amp bf16")
    fi
    ;;
  esac
  shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    flags+=("$1")
    shift
  done
  [ $# -eq 0 ] || shift
  .venv/bin/python -m leanrl.tools.compare --seeds 1 2 3 --total-timesteps "$steps" --max-seconds None \
    --contenders "${peers[@]/%/:$name}" "${peers[@]/%/:$name --num-threads 1}" \
    "$script" "${script}_torchcompile" "${fast[@]}" "${flags[@]}" -- "${script_args[@]}" "$@"
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
"")
  install "" mujoco envpool
  exec .venv/bin/python -m leanrl.tools.compare
  ;;
-h | --help | help)
  usage
  ;;
test)
  # With --all also the peers, which some of the long tests run.
  install "" mujoco envpool hub dev $([[ " $* " != *" --all "* ]] || echo peers)
  # A worker on each core, each with whole files as long as there are some (tests/conftest.py).
  exec .venv/bin/python -m pytest --numprocesses=$(nproc) --dist=worksteal "$@"
  ;;
bench)
  install "" mujoco envpool dev peers
  case ${1:--} in
  -*)
    failed=0
    # 1: a run of this line failed, and the others go on.
    for line in PPO SAC TD3 DQN PPO-Atari; do bench "$line" "$@" || { [ $? -eq 1 ] && failed=1; }; done
    exit $failed
    ;;
  *) bench "$@" ;;
  esac
  ;;
*)
  name=$(basename -- "$command" .py)
  if [ -f "leanrl/$name.py" ] && [ "$name" != __init__ ]; then
    install "" mujoco envpool
    exec .venv/bin/python "leanrl/$name.py" "$@"
  elif grep -qsF 'run_tool(main, Args)' "leanrl/tools/$name.py"; then
    # A tool that needs more says so in a line of its own.
    # shellcheck disable=SC2046
    install "" mujoco envpool $(sed -n 's/^# requires: //p' "leanrl/tools/$name.py")
    exec .venv/bin/python -m "leanrl.tools.$name" "$@"
  fi
  sibling=${name%_onegraph}_torchcompile
  case $name in
  *_onegraph) [ ! -f "leanrl/$sibling.py" ] || die "$name is a mode now: ./run.sh $sibling --compile --one-graph" ;;
  esac
  die "no script or tool is called $command; ./run.sh --help lists what there is"
  ;;
esac
