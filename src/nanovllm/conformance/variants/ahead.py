"""The reference with a second step planned before the tokens of the first are known."""

from dataclasses import replace

from nanovllm.config import SchedulerConfig
from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.planting import plantings_in
from nanovllm.conformance.protocol import Hello
from nanovllm.conformance.variants.variant import variant
from nanovllm.engine.block_manager import HashFunction
from nanovllm.engine.scheduler import Scheduler


@variant
class OneStepAhead(ReferenceCore):
    """A second step is planned before the tokens of the first are known."""

    def __init__(self, scheduler_class: object = None) -> None:
        super().__init__(_ahead)

    def hello(self) -> Hello:
        return replace(super().hello(), ahead=1)


def _ahead(config: SchedulerConfig, hash_function: HashFunction) -> Scheduler:
    return Scheduler(replace(config, max_steps_in_flight=2), hash_function)


VARIANTS = plantings_in(globals())
