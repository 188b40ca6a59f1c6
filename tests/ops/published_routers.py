"""The routers of sixteen published model classes, as transformers implements them, and what `route` calls them.

Each row: the model type, the router's class, the configuration it needs, where its selection bias lives ("own" buffer,
"statics", an "argument", or none), and the options that make `moegraph.ops.route` the same function.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

D_MODEL, EXPERTS, TOP_K = 64, 8, 2


@dataclass(frozen=True)
class Published:
    model_type: str
    router: str
    experts_key: str = "num_experts"
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    bias: str = "none"
    norm_eps: float = 0.0  # of the renormalisation, where the class has the flag norm_topk_prob

    def build(self) -> tuple[Any, nn.Module]:
        """(configuration, router) with random weights and a random bias."""
        from transformers import AutoConfig

        sizes = {"hidden_size": D_MODEL, self.experts_key: EXPERTS}
        sizes["moe_k" if self.model_type == "ernie4_5_moe" else "num_experts_per_tok"] = TOP_K
        config = AutoConfig.for_model(self.model_type, **sizes, **self.config)
        modeling = importlib.import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")
        router = getattr(modeling, self.router)(config)
        for parameter in router.parameters():
            nn.init.normal_(parameter, std=0.5)
        return config, router

    def select_bias(self, router: nn.Module) -> Tensor | None:
        """A random selection bias [E], put where the router looks for it."""
        if self.bias == "none":
            return None
        bias = torch.randn(EXPERTS) * 0.3
        owner = router.moe_statics if self.bias == "statics" else router
        if self.bias != "argument":
            owner.e_score_correction_bias.data.copy_(bias)
        return bias


DEEPSEEK_GROUPS = {"n_group": 4, "topk_group": 2}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
ROUTED = "n_routed_experts"
LOCAL = "num_local_experts"

PUBLISHED = [
    Published("olmoe", "OlmoeTopKRouter"),
    Published("flex_olmo", "FlexOlmoTopKRouter"),
    Published("qwen3_moe", "Qwen3MoeTopKRouter"),
    Published("qwen2_moe", "Qwen2MoeTopKRouter"),
    Published("qwen3_next", "Qwen3NextTopKRouter"),
    Published("mixtral", "MixtralTopKRouter", LOCAL, options={"norm_kind": "sum"}),
    Published("gpt_oss", "GptOssTopKRouter", LOCAL, options={"score": "none", "weight_from": "softmax_selected"}),
    Published(
        "granitemoe", "GraniteMoeTopKRouter", LOCAL, options={"score": "none", "weight_from": "softmax_selected"}
    ),
    Published(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        ROUTED,
        {**DEEPSEEK_GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
        {"groups": (4, 2, "max", "zero"), "scale": 1.5},
    ),
    Published(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        ROUTED,
        {**DEEPSEEK_GROUPS, "routed_scaling_factor": 2.5},
        {"score": "sigmoid", "groups": (4, 2, "top2_sum", "-inf"), "scale": 2.5},
        "own",
        1e-20,
    ),
    Published(
        "glm4_moe",
        "Glm4MoeTopkRouter",
        ROUTED,
        {**ONE_GROUP, "routed_scaling_factor": 1.0},
        {"score": "sigmoid", "groups": (1, 1, "top2_sum", "-inf")},
        "own",
        1e-20,
    ),
    Published(
        "dots1",
        "Dots1TopkRouter",
        ROUTED,
        {**ONE_GROUP, "routed_scaling_factor": 1.0},
        {"score": "sigmoid", "groups": (1, 1, "top2_sum", "-inf")},
        "own",
        1e-20,
    ),
    Published(
        "minimax_m2",
        "MiniMaxM2TopKRouter",
        LOCAL,
        options={"score": "sigmoid", "norm_kind": "sum"},
        bias="argument",
    ),
    Published(
        "ernie4_5_moe",
        "Ernie4_5_MoeTopKRouter",
        "moe_num_experts",
        options={"norm_kind": "sum", "norm_eps": 1e-12, "norm_mode": "clamp"},
        bias="statics",
    ),
    Published(
        "afmoe",
        "AfmoeTokenChoiceRouter",
        config={"route_scale": 1.25},
        options={"score": "sigmoid", "norm_kind": "sum", "norm_eps": 1e-20, "scale": 1.25},
        bias="argument",
    ),
    Published(
        "lfm2_moe",
        "Lfm2MoeTopKRouter",
        config={"use_expert_bias": True, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
        options={"score": "sigmoid"},
        bias="argument",
        norm_eps=1e-6,
    ),
]
