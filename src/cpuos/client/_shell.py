"""The bash side of a kept shell: each run is a bash of its own that first takes over what the last one left.

The text to run is an argument, never part of the script, so an open quote, a heredoc without its end or an `exit`
concern that run alone. The state goes to one of two files in turn, so a run that is killed while it saves leaves the
state before it. What was restored and saved is told in a third file, which is read after each run.

Kept: directory, directory stack, variables with their attributes, functions, aliases, options of `set` and `shopt`,
positional parameters, umask, traps of signals, and `$?`. Not kept: background jobs as jobs (`%1`), redirections by
`exec`, ulimits, and EXIT, DEBUG, RETURN and ERR traps: an EXIT trap runs at the end of the run that set it.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

__all__ = ["MAX_TEXT_ARGUMENT", "ShellState", "shell_argv"]

# Linux takes 128 KiB in one argument.
MAX_TEXT_ARGUMENT = 96 << 10

# Names that bash makes anew, that name this very run, or that are restored in another way.
_NOT_KEPT = (
    "__cpuos_*|CPUOS_*|BASH|BASHOPTS|BASHPID|BASH_ALIASES|BASH_ARG*|BASH_CMDS|BASH_COMMAND|BASH_EXECUTION_STRING"
    "|BASH_LINENO|BASH_LOADABLES_PATH|BASH_REMATCH|BASH_SOURCE|BASH_SUBSHELL|BASH_VERS*|BASH_XTRACEFD|COMP_WORDBREAKS"
    "|DIRSTACK|EPOCHREALTIME|EPOCHSECONDS|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OLDPWD|PIPESTATUS|PPID|PWD|RANDOM"
    "|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_"
)
# "${!a@}" names the variables that begin with "a", without a process of its own.
_ALL_NAMES = " ".join(f'"${{!{letter}@}}"' for letter in string.ascii_letters + "_")
_SIGNALS = "HUP INT QUIT TERM USR1 USR2 PIPE ALRM CHLD CONT TSTP TTIN TTOU WINCH"

# One line: bash reads a whole line before it runs any of it, so no restored alias reaches this text, and the lines that
# error messages tell are those of the user's own text.
_SCRIPT = " ".join(
    (
        'builtin eval "$1"; shift; __cpuos_begin "$@"; set --;',
        '[[ -z $__cpuos_load ]] || builtin . "$__cpuos_dir/state.$__cpuos_load" >/dev/null 2>&1;',
        'if __cpuos_ready; then builtin eval "$__cpuos_text"; else builtin eval "$__cpuos_text"; fi',
    )
)
_FUNCTIONS = f"""
__cpuos_begin() {{
  __cpuos_dir=$1 __cpuos_run=$2 __cpuos_load=$3 __cpuos_expected=$4 __cpuos_save=$5
  __cpuos_cwd=$6 __cpuos_status=$7 __cpuos_text=$8
  __cpuos_flags= __cpuos_exit= __cpuos_restored=1 __cpuos_complete= __cpuos_oldpwd=
  [[ -z $9 ]] || IFS= read -r -d '' __cpuos_text < "$9"
  [[ -d $__cpuos_dir ]] || command -p mkdir -p -m 700 -- "$__cpuos_dir"
  shopt -s expand_aliases
}}
__cpuos_keep() {{
  local __cpuos_name __cpuos_at __cpuos_ok=
  {{
    builtin shopt -p
    for __cpuos_name in {_ALL_NAMES}; do
      case $__cpuos_name in
        {_NOT_KEPT}) ;;
        *) builtin declare -p -- "$__cpuos_name" ;;
      esac
    done
    builtin printf 'umask '; builtin umask
    builtin trap -p {_SIGNALS}
    builtin printf 'set --'; (($#)) && builtin printf ' %q' "$@"; builtin printf '\\n'
    for ((__cpuos_at = ${{#DIRSTACK[@]}} - 1; __cpuos_at > 0; __cpuos_at--)); do
      builtin printf 'pushd -n %q\\n' "${{DIRSTACK[__cpuos_at]/#\\~/$HOME}}"
    done
    builtin printf '__cpuos_cwd=%q __cpuos_oldpwd=%q\\n' "$PWD" "${{OLDPWD-}}"
    builtin printf '__cpuos_flags=%q\\n' "$__cpuos_flags"
    builtin set +o
    # Last what can change the meaning of the lines above: functions and aliases of those names.
    builtin declare -f
    builtin declare -F
    builtin alias -p
    builtin printf '__cpuos_complete=%q\\n' "$__cpuos_run" && __cpuos_ok=1
  }} >| "$__cpuos_dir/state.$__cpuos_save"
  [[ $__cpuos_ok ]] && builtin printf '%s %s\\n' "$__cpuos_run" "$__cpuos_restored" >| "$__cpuos_dir/status"
}}
__cpuos_end() {{
  __cpuos_status=$? __cpuos_flags=$SHELLOPTS
  builtin set +euxvt +o posix
  __cpuos_keep "$@"
  builtin trap - EXIT
}}
__cpuos_leave() {{
  [[ $__cpuos_exit ]] || return "$__cpuos_status"
  __cpuos_again "$__cpuos_status"
  builtin eval "$__cpuos_exit"
}}
__cpuos_again() {{ return "$1"; }}
trap() {{
  local __cpuos_action __cpuos_signal
  local -a __cpuos_others=()
  if ((BASH_SUBSHELL || $# < 2)) || [[ $1 == -[lpP]* ]]; then builtin trap "$@"; return; fi
  [[ $1 == -- ]] && shift
  __cpuos_action=$1; shift
  for __cpuos_signal; do
    case ${{__cpuos_signal^^}} in
      EXIT|SIGEXIT|0) if [[ $__cpuos_action == - ]]; then __cpuos_exit=; else __cpuos_exit=$__cpuos_action; fi ;;
      *) __cpuos_others+=("$__cpuos_signal") ;;
    esac
  done
  ((${{#__cpuos_others[@]}} == 0)) || builtin trap -- "$__cpuos_action" "${{__cpuos_others[@]}}"
}}
__cpuos_ready() {{
  builtin trap '{{ __cpuos_end "$@"; }} 2>/dev/null; __cpuos_leave' EXIT
  [[ -z $__cpuos_load || $__cpuos_complete == "$__cpuos_expected" ]] || __cpuos_restored=0
  until builtin cd -- "$__cpuos_cwd"; do
    case $__cpuos_cwd in /*/*) __cpuos_cwd=${{__cpuos_cwd%/*}} ;; *) __cpuos_cwd=/ ;; esac
  done 2>/dev/null
  if [[ $__cpuos_oldpwd ]]; then OLDPWD=$__cpuos_oldpwd; else builtin unset OLDPWD; fi
  [[ :$__cpuos_flags: != *:xtrace:* ]] || __cpuos_text=$'set -x\\n'$__cpuos_text
  [[ :$__cpuos_flags: != *:verbose:* ]] || __cpuos_text=$'set -v\\n'$__cpuos_text
  [[ :$__cpuos_flags: != *:posix:* ]] || builtin set -o posix
  [[ :$__cpuos_flags: != *:nounset:* ]] || builtin set -u
  [[ :$__cpuos_flags: != *:errexit:* ]] || builtin set -e
  return "$__cpuos_status"
}} 2>/dev/null
"""


@dataclass(frozen=True, kw_only=True)
class ShellState:
    """Where the shell stands: number of the run, and the file that has what the last good run left."""

    directory: str
    cwd: str
    run: int = 1
    saved_by: int = 0
    """The run whose state is loaded; 0: none yet."""
    slot: int = 1
    """The file that has it. The run saves to the other one."""
    exit_status: int = 0

    @property
    def status_path(self) -> str:
        return f"{self.directory}/status"

    @property
    def text_path(self) -> str:
        """Where a text goes that is too long for an argument."""
        return f"{self.directory}/text"

    def after(self, status: bytes | None, *, exit_status: int | None) -> tuple[ShellState, bool]:
        """The state for the next run from what the run left in the status file; True: something was lost."""
        words = (status or b"").split()
        saved = len(words) == 2 and words[0] == str(self.run).encode()
        restored = saved and words[1] == b"1"
        return (
            ShellState(
                directory=self.directory,
                cwd=self.cwd,
                run=self.run + 1,
                saved_by=self.run if saved else self.saved_by,
                slot=1 - self.slot if saved else self.slot,
                exit_status=exit_status if exit_status is not None else 1,
            ),
            not restored,
        )


def shell_argv(text: str, state: ShellState) -> list[str]:
    """The command of one run. A text too long for an argument lies in `state.text_path`."""
    in_file = len(text.encode()) > MAX_TEXT_ARGUMENT
    return [
        "/bin/bash",
        "--noprofile",
        "--norc",
        "-c",
        _SCRIPT,
        "bash",
        _FUNCTIONS,
        state.directory,
        str(state.run),
        str(state.slot) if state.saved_by else "",
        str(state.saved_by),
        str(1 - state.slot),
        state.cwd,
        str(state.exit_status),
        "" if in_file else text,
        state.text_path if in_file else "",
    ]
