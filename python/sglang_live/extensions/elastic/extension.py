"""Elastic pools: the KV pools of thinker and talker exchange memory while they serve."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_live.errors import BadInputError
from sglang_live.extension import Addition, Extension
from sglang_live.extensions.elastic.messages import STAGES
from sglang_live.policy.policies import Policies
from sglang_live.settings import Settings, flag

if TYPE_CHECKING:
    from sglang_live.stages.spec import StageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticFlags(Settings):
    elastic_kv: bool = flag(False, "thinker and talker exchange memory of their KV")


class ElasticExtension(Extension):
    title = "elastic pools"
    flags = ElasticFlags

    def addition(
        self, own: argparse.Namespace, policies: Policies, stages: "Mapping[str, StageConfig]"
    ) -> Addition | None:
        if not own.elastic_kv:
            return None
        if not policies:
            raise BadInputError("--elastic-kv needs policies: SGLang's own scheduler cannot resize")
        if vars(own).get("borrow"):  # a flag of another extension, which may be absent
            raise BadInputError("--elastic-kv and --borrow: memory is moved or lent, not both")
        for name in STAGES:
            if stages[name].connect or stages[name].replicas > 1:
                raise BadInputError(f"--elastic-kv needs one {name}, which this server starts")
            if stages[name].args.get("tp_size", 1) * stages[name].args.get("pp_size", 1) > 1:
                raise BadInputError(f"--elastic-kv needs a {name} of one rank")
        if len({stages[name].devices[0] for name in STAGES}) > 1:
            raise BadInputError("--elastic-kv needs a thinker and a talker on one device")
        from sglang_live.extensions.elastic.pools import ElasticPools

        return ElasticPools()


EXTENSION = ElasticExtension()
