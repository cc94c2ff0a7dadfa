"""`lockstep checkpoint`: look at checkpoints, check them, write them for other libraries, read those of others.

Parsing, explaining and refusing need no torch, so they are quick.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.errors import CheckpointMissing, ConfigError, LockstepError
from lockstep.launch.words import Words, refuse_name

_USER_ERROR = 2
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

HELP = """usage: lockstep checkpoint [-h] COMMAND ...

Checkpoints that lockstep has written. DIR is the folder they are in, a run's folder, or one checkpoint.

commands:
  ls       one line for each: step, when, size, ranks, generation: `lockstep checkpoint ls out/`
  verify   read every byte and name what is damaged: `lockstep checkpoint verify out/`
  show     what is in one: `lockstep checkpoint show out/ 'model/*bias' --step 100`
  export   write one for transformers, safetensors or torch: `lockstep checkpoint export out/ gpt2/`
  import   make one of what another library has saved: `lockstep checkpoint import model.pt new/`

`lockstep checkpoint COMMAND --help` explains one."""


def checkpoint(words: Sequence[str]) -> int:
    """`lockstep checkpoint ...`; returns the exit code: 0 done, 1 failed or damaged, 2 asked for the impossible.

    Raises: ConfigError for words that are not understood.
    """
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if words[0] not in _COMMANDS:
        refuse_name("unknown command", words[0], _COMMANDS, "lockstep checkpoint", "lockstep checkpoint --help")
    parser = Words(prog=f"lockstep checkpoint {words[0]}", allow_abbrev=False)
    try:
        return _COMMANDS[words[0]](parser, words[1:])
    except ConfigError:  # as for all commands
        raise
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return _USER_ERROR if isinstance(error, CheckpointMissing) else 1


# ------------------------------------------------------------------ commands: which words, and what is done


def _ls(parser: Words, words: Sequence[str]) -> int:
    parser.description = "One line for each checkpoint, the newest first. Their tensors are not read without --verify."
    _add_directory(parser)
    parser.add_argument("--verify", action="store_true", help="read every byte, and say which are good")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options = parser.read(words)
    from lockstep.cli.checkpoint_listing import list_checkpoints

    return list_checkpoints(options.directory, verify=options.verify, as_json=options.json)


def _verify(parser: Words, words: Sequence[str]) -> int:
    parser.description = "Read every byte; name the files and tensors that are damaged, and end with code 1 if any is."
    _add_directory(parser)
    _add_step(parser, "all of them")
    options = parser.read(words)
    from lockstep.cli.checkpoint_listing import verify_checkpoints

    return verify_checkpoints(options.directory, options.step)


def _show(parser: Words, words: Sequence[str]) -> int:
    parser.description = "The tensors of a checkpoint: path, dtype, shape, size, and the files they are in."
    _add_directory(parser)
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="paths, as model or 'model/*bias'")
    _add_step(parser, "the newest")
    parser.add_argument("--values", action="store_true", help="also what is no tensor")
    options = parser.read(words)
    from lockstep.cli.checkpoint_listing import show_checkpoint

    return show_checkpoint(options.directory, options.step, options.pattern, with_values=options.values)


def _export(parser: Words, words: Sequence[str]) -> int:
    parser.description = "Verify a checkpoint and write its tensors for other libraries. Nothing is written over."
    _add_directory(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder for hf, else a file; not there, or empty")
    _add_step(parser, "the newest")
    parser.add_argument("--key", default="model", help="what of it, as model or ema/model; '' for all (default: model)")
    forms = "a folder for transformers, one file of tensors, or a file for torch.load (default: hf)"
    parser.add_argument("--format", choices=("hf", "safetensors", "torch"), default="hf", help=forms)
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.json of the model, to be copied into OUT")
    largest = "largest file of a folder (default: 5GB)"
    parser.add_argument("--shard-size", type=_bytes, default="5GB", metavar="SIZE", help=largest)
    options = parser.read(words)
    from lockstep.checkpoint.foreign.export import export_checkpoint
    from lockstep.checkpoint.reader import open_checkpoint, some
    from lockstep.cli.checkpoint_listing import checkpoint_of, size_text

    out, how = options.out, {"key": options.key, "form": options.format, "config": options.config}
    with open_checkpoint(checkpoint_of(options.directory, options.step)) as reader:
        done = export_checkpoint(reader, out, shard_bytes=options.shard_size, **how)
    size = sum(path.stat().st_size for path in ([done.path] if done.path.is_file() else done.path.iterdir()))
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    print(f"{done.path}: {done.tensors} tensors of step {reader.manifest.step}, {size_text(size)} in {files}")
    if done.left_out:
        print(f"left out, as files of weights hold tensors only: {some(done.left_out)}", file=sys.stderr)
    if options.format == "hf" and "tokenizer.json" not in done.files:
        lacks = "no tokenizer is in it, as the run has left none: copy tokenizer.json and tokenizer_config.json into"
        print(f"{lacks} {done.path}", file=sys.stderr)
    return 0


def _import(parser: Words, words: Sequence[str]) -> int:
    parser.description = (
        "Make a checkpoint of what another library has saved: a file of torch.save, a .safetensors file, a Hugging "
        "Face folder, a folder of torch.distributed.checkpoint. Nothing in them is run."
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("directory", type=Path, metavar="DIR", help="the new folder of checkpoints")
    _add_step(parser, "the state's own, else 0")
    parser.add_argument("--key", default="", help="where in the checkpoint it comes, as model (default: at the top)")
    options = parser.read(words)
    from lockstep.checkpoint.foreign.reading import import_checkpoint

    print(import_checkpoint(options.source, options.directory, step=options.step, key=options.key))
    return 0


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="checkpoints, a run's folder, or one checkpoint")


def _add_step(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--step", type=_step, metavar="N", help=f"which one (default: {default})")


def _step(word: str) -> int:
    if not re.fullmatch(r"\d{1,18}", word):
        raise argparse.ArgumentTypeError(f"{word!r} is no number of a step")
    return int(word)


def _bytes(word: str) -> int:
    found = re.fullmatch(r"(\d{1,12})\s*([A-Za-z]*)", word)
    unit = _UNITS.get(found[2].upper()) if found else None
    if not found or unit is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is no size like 5GB or 500MiB")
    return int(found[1]) * unit


_COMMANDS: dict[str, Callable[[Words, Sequence[str]], int]] = {
    "ls": _ls, "verify": _verify, "show": _show, "export": _export, "import": _import,
}  # fmt: skip
