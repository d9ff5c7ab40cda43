"""`noria eval`: run tasks of lm-evaluation-harness on a model."""

import argparse
import sys
from pathlib import Path

from ..console import tell
from ..errors import ConfigError
from ..files.file_checks import check_fillable
from .shared_options import add_dtype, add_layout, add_model


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser)
    add("--tasks", required=True, help="names of tasks and groups, separated by commas")
    add("--include-path", type=Path, metavar="DIR", help="folder with files of further tasks")
    add("-o", "--output", type=Path, metavar="DIR", help="folder for the results (default: none)")
    add("--log-samples", action="store_true", help="write every sample beside the results")
    add("--num-fewshot", type=int, metavar="N", help="examples before each item of a task")
    add("--limit", type=float, metavar="N", help="items of each task, or a share below 1")
    add("--gen-kwargs", metavar="K=V,...", help="generation options instead of those of tasks")
    add(
        "--apply-chat-template",
        action="store_true",
        help="render contexts with the model's chat template",
    )
    add("--system-instruction", metavar="TEXT", help="system message of the chat template")
    add("--plan", metavar="PATH", help="plan file or bundle to use")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of the longest context and answer (default: the model's, at most 2048)",
    )
    add("--slots", type=int, metavar="N", help="decode slots (default: 16)")
    add_dtype(parser)
    add("--target", help="hardware to run on (default: this machine's accelerator, else cpu)")
    add_layout(parser)


def run(options: argparse.Namespace) -> int:
    """Run the tasks, and print their results."""
    if options.output is not None:
        # before anything runs, as the harness only logs that it cannot write
        check_fillable(options.output)
    elif options.log_samples:
        raise ConfigError(
            "--log-samples: expected --output beside it, got none. Name the folder of the samples."
        )
    from ..evaluation.evaluate import evaluate

    named = {
        "plan": options.plan,
        "max_model_len": options.max_length,
        "max_num_seqs": options.slots,
        "target": options.target,
        "layout": options.layout,
    }
    given = {name: value for name, value in named.items() if value is not None}
    table = evaluate(
        {
            "pretrained": options.model,
            "dtype": options.dtype,
            "strict_config": options.strict_config,
            **given,
        },
        options.tasks.split(","),
        include_path=options.include_path,
        output=options.output,
        log_samples=options.log_samples,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        gen_kwargs=options.gen_kwargs,
        apply_chat_template=options.apply_chat_template,
        system_instruction=options.system_instruction,
    )
    tell(sys.stdout, table)
    return 0
