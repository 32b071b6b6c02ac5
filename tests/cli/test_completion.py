"""Shell completion as the README says to install it: scripts that shtab writes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "deepinfer-compile": "deepinfer_compile.cli.parser",
    "deepinfer-engine": "deepinfer_compile.runtime.cli.parser",
}


def script(tmp_path: Path, shell: str, command: str) -> Path:
    out = tmp_path / f"{command}.{shell}"
    shtab = Path(sys.executable).with_name("shtab")
    subprocess.run([shtab, "-u", "-s", shell, COMMANDS[command], "-o", out], check=True)
    return out


def completed(file: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    line = f"""
source {file}
function=$(complete -p {words[0]} | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD={len(words) - 1}
$function {words[0]} '{words[-1]}' '{words[-2]}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_options_and_values(tmp_path):
    file = script(tmp_path, "bash", "deepinfer-compile")
    assert completed(file, "deepinfer-compile", "--fr") == ["--from-hf"]
    assert completed(file, "deepinfer-compile", "--numerics", "v") == ["vendor"]


def test_bash_completes_verbs_and_their_options(tmp_path):
    file = script(tmp_path, "bash", "deepinfer-engine")
    assert completed(file, "deepinfer-engine", "in") == ["inspect"]
    assert completed(file, "deepinfer-engine", "run", "--max") == ["--max-tokens"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_zsh_script_names_the_command(tmp_path, command):
    file = script(tmp_path, "zsh", command)
    text = file.read_text()
    assert text.startswith(f"#compdef {command}\n")
    assert "--json" in text
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n", file], check=True)


def test_starting_a_command_does_not_import_it():
    line = "import sys; import deepinfer_compile.cli, deepinfer_compile.runtime.cli; "
    check = "deepinfer_compile.cli.parser(); sys.exit('shtab' in sys.modules)"
    subprocess.run([sys.executable, "-c", line + check], check=True)
