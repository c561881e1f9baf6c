#!/usr/bin/env bash
# Installs what the build needs and is missing, configures, builds. Changes nothing that is already right, and
# asks for root only to install. See usage().
set -euo pipefail
export LC_ALL=C

usage() {
  cat <<'TEXT'
usage: tools/bootstrap.sh [--preset NAME] [--target NAME]... [--no-build]

  --preset NAME  a configure preset of CMakePresets.json (default: release); the build goes to build/NAME
  --target NAME  build only this target; may be repeated (default: everything)
  --no-build     install and configure only

Installs missing packages on Debian 12 or later and Ubuntu 22.04 or later; elsewhere it says what is needed.
The CUDA device is built if nvcc (CUDA 13 or later) is on PATH or in CUDACXX; without it, everything else is.
SLUICE_JOBS=N builds with N jobs at once, instead of one per core and 1.5 GiB of free memory.
Exit codes: 0 ok, 1 configuring or building failed, 2 wrong usage or something missing that cannot be installed.
TEXT
}

say() { printf 'bootstrap: %s\n' "$*"; }
fail() {
  printf 'bootstrap: error: %s\n' "$*" >&2
  exit 2
}

# Commands the build calls, with the package that brings each.
readonly kCommands=(
  "g++ g++"
  "cmake cmake"
  "ninja ninja-build"
  "pkg-config pkg-config"
)
# Libraries, by the package that brings headers and CMake or pkg-config files. Catch2 is v2 or v3, as it comes.
readonly kLibraries=(libtbb-dev libhwloc-dev libeigen3-dev nlohmann-json3-dev libcli11-dev catch2)
# What the tests of python/ need, and tools/python_env.sh; torch.compile wants the headers.
readonly kPython=(python3-dev python3-numpy python3-pytest python3-venv)
# Makes a second build faster and is not worth asking for root: installed along, never on its own.
readonly kOptional=(ccache)

have() { command -v "$1" >/dev/null 2>&1; }
package_installed() { [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]; }
# at_least 3.25.1 3.22
at_least() { [[ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" == "$2" ]]; }

# Whether this is a system whose packages are known to be recent enough.
known_system() {
  [[ -r /etc/os-release ]] && have apt-get && have dpkg-query || return 1
  local id version
  # shellcheck source=/dev/null
  id=$(. /etc/os-release && echo "${ID:-}")
  # shellcheck source=/dev/null
  version=$(. /etc/os-release && echo "${VERSION_ID:-}")
  case "$id" in
    # Debian's testing and unstable have no version, and are newer than any that has.
    debian) [[ -z "$version" ]] || at_least "$version" 12 ;;
    ubuntu) [[ -n "$version" ]] && at_least "$version" 22.04 ;;
    *) return 1 ;;
  esac
}

missing_commands() {
  local entry
  for entry in "${kCommands[@]}"; do
    have "${entry% *}" || echo "${entry#* }"
  done
}

missing_packages() {
  missing_commands
  local package
  for package in "${kLibraries[@]}" "${kPython[@]}"; do
    package_installed "$package" || echo "$package"
  done
}

# Prints what precedes a command that needs root; fails with the remedy if there is no way to become root.
root_prefix() {
  [[ "$(id -u)" -eq 0 ]] && return
  have sudo || fail "root is needed once; as root, run:" \
    "apt-get update && apt-get install --no-install-recommends $*"
  # Without a terminal nobody can type a password: better to fail than to hang.
  if [[ -t 0 ]]; then echo sudo; else echo sudo -n; fi
}

# Whether the package lists have all of them. Needs no root.
installable() { apt-get -qq --simulate --no-install-recommends install "$@" >/dev/null 2>&1; }

install_packages() {
  local packages=("$@") package prefix
  for package in "${kOptional[@]}"; do
    package_installed "$package" || packages+=("$package")
  done
  prefix=$(root_prefix "${packages[@]}")
  say "installing with apt-get${prefix:+ as root, through sudo}: ${packages[*]}"

  # A fresh machine boots into its own updates; wait for that lock instead of failing.
  # shellcheck disable=SC2206  # the prefix is one word, two words or none
  local apt=($prefix env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
  local install=("${apt[@]}" install -y --no-install-recommends "${packages[@]}")
  # Package lists may be absent, or too old to name files that still exist.
  if installable "${packages[@]}" && "${install[@]}" </dev/null; then return; fi
  say "updating the package lists"
  "${apt[@]}" update </dev/null || fail "apt-get update failed; check the network and /etc/apt/sources.list*"
  "${install[@]}" </dev/null || fail "apt-get could not install ${packages[*]};" \
    "on Ubuntu they need the component 'universe' in /etc/apt/sources.list*"
}

describe_needs() {
  cat >&2 <<'TEXT'
bootstrap: this system's packages are not known here. Install with its own package manager, development files included:
  g++ 11 or later (C++20), CMake 3.22 or later, Ninja, pkg-config,
  oneTBB 2021 or later, hwloc 2.x, Eigen 3.3 or later, nlohmann-json 3.x, CLI11 1.9 or later, Catch2 2.13 or 3.x;
  for the tests of python/ also Python 3.10 or later with its headers, venv, numpy and pytest;
  for the CUDA device also CUDA 13 or later
TEXT
}

# A clang that links libFuzzer and knows the library's C++20: from 16 on.
find_fuzz_compiler() {
  local name
  for name in clang++ clang++-{22..16}; do
    have "$name" && at_least "$("$name" -dumpversion)" 16 || continue
    if echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
      "$name" -x c++ -fsanitize=fuzzer,address -o /dev/null - 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  return 1
}

# For the preset `fuzz` alone.
ensure_fuzz_compiler() {
  find_fuzz_compiler >/dev/null && return
  local version
  for version in {22..16}; do
    known_system && installable "clang-$version" "libclang-rt-$version-dev" || continue
    install_packages "clang-$version" "libclang-rt-$version-dev"
    find_fuzz_compiler >/dev/null && return
  done
  fail "the preset fuzz needs clang 16 or later with its sanitizer runtimes (compiler-rt); install them, or run the" \
    "fuzz targets without libFuzzer: ctest --preset release -L fuzz"
}

ensure_tools() {
  local missing
  if known_system; then
    read -ra missing <<<"$(missing_packages | tr '\n' ' ')"
    [[ ${#missing[@]} -eq 0 ]] || install_packages "${missing[@]}"
  else
    read -ra missing <<<"$(missing_commands | tr '\n' ' ')"
    if [[ ${#missing[@]} -gt 0 ]]; then
      describe_needs
      fail "not found: ${missing[*]}"
    fi
  fi
  # An older copy earlier in PATH hides the package's.
  local version
  version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  at_least "$version" 3.22 || fail "$(command -v cmake) is version $version, 3.22 is needed; remove it from PATH"
}

# CUDA is optional and comes from NVIDIA, not from the packages above.
describe_cuda() {
  local compiler
  if compiler=$(command -v "${CUDACXX:-nvcc}"); then
    say "CUDA: $compiler, $("$compiler" --version | sed -n 's/.*release \([0-9.]*\).*/release \1/p')"
  else
    say "CUDA: no nvcc on PATH, so the CUDA device is left out; it needs CUDA 13 (nothing else does)"
  fi
}

configure() {
  say "configuring build/$1"
  local compiler=()
  if [[ "$1" == fuzz ]]; then compiler=("-DCMAKE_CXX_COMPILER=$(find_fuzz_compiler)"); fi
  if cmake --preset "$1" ${compiler[@]+"${compiler[@]}"}; then return; fi
  known_system || { describe_needs; fail "see CMake's message above for what it did not find"; }
  say "error: CMake failed, see above;" \
    "if build/$1 comes from another place or compiler, delete it and run this again" >&2
  exit 1
}

# Jobs that neither the cores nor the memory regret: a translation unit takes up to 1.5 GiB.
job_count() {
  local cores kib limit jobs
  cores=$(nproc)
  kib=$(sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo 2>/dev/null || true)
  # A container may have less than its machine; "max" means it has not.
  limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
  if [[ "$limit" != max ]] && ((limit / 1024 < ${kib:-limit})); then kib=$((limit / 1024)); fi
  # Without /proc the memory is unknown: trust the cores.
  jobs=$((${kib:-$((cores * 1572864))} / 1572864))
  if ((jobs > cores)); then jobs=$cores; fi
  if ((jobs < 1)); then jobs=1; fi
  echo "${SLUICE_JOBS:-$jobs}"
}

build() {
  local preset=$1 jobs
  shift
  jobs=$(job_count)
  say "building ${*:-everything} in build/$preset, jobs: $jobs"
  cmake --build --preset "$preset" --parallel "$jobs" ${1:+--target "$@"}
}

main() {
  local preset=release no_build=0 targets=()
  while [[ $# -gt 0 ]]; do
    case "$1" in
      --preset | --target)
        [[ -n "${2:-}" ]] || fail "$1 needs a name; see --help"
        if [[ "$1" == --preset ]]; then preset=$2; else targets+=("$2"); fi
        shift 2
        ;;
      --no-build) no_build=1; shift ;;
      -h | --help) usage; exit 0 ;;
      *) fail "unknown option '$1'; see --help" ;;
    esac
  done
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  grep -q "\"name\": \"$preset\"" CMakePresets.json || fail "no preset '$preset' in CMakePresets.json"
  ensure_tools
  if [[ "$preset" == fuzz ]]; then ensure_fuzz_compiler; fi
  describe_cuda
  configure "$preset"
  [[ "$no_build" -eq 1 ]] || build "$preset" ${targets[@]+"${targets[@]}"}
}

main "$@"
