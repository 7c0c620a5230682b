"""Which samples of a rollout are kept as files.

In: settings and the update. Out: how many of the rollout's samples are written. A user who asks for
`save_samples_steps` gets whole rollouts at these updates and nothing else; everybody else gets a few samples of the
first rollout, of one every `log_samples_steps` updates, and of the last.
"""

from ..config.settings import DiffusionGRPOConfig
from ..training.progress import updates_per_rollout


def saves_whole_rollout(args: DiffusionGRPOConfig, step: int) -> bool:
    """Whether all samples of this rollout are saved: the first at or after each multiple of `save_samples_steps`.

    Args:
        step: updates done when it is made.
    """
    return args.save_samples_steps is not None and step % args.save_samples_steps < updates_per_rollout(args)


def count_kept(args: DiffusionGRPOConfig, step: int, last_step: int) -> int:
    """How many samples of a rollout are kept, by their position in it.

    Args:
        step: updates done when it is made.
        last_step: updates of the whole run.
    """
    if saves_whole_rollout(args, step):
        return args.prompts_per_generation * args.num_generations
    if args.save_samples_steps is not None or args.log_samples_steps is None or not args.log_completions:
        return 0
    updates = updates_per_rollout(args)
    is_last = step + updates >= last_step
    return args.num_completions_to_log if is_last or step % args.log_samples_steps < updates else 0
