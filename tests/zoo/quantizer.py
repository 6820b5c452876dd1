"""Wrong quantizers: the right one of `right_quantizer.py` with one thing of it done wrongly."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from mutation import Mutant
from wrong import Wrong

from jackfield.contracts import Backend

SOURCE = Path(__file__).with_name("right_quantizer.py").read_text()

FORWARD = "return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)"
INIT = "        self.bias = None if bias is None"


def changed(*pairs: tuple[str, str]) -> Callable[[], Backend]:
    """The right one with each first text, which must be there, replaced by the second."""

    def made() -> Backend:
        text = SOURCE
        for old, new in pairs:
            assert old in text, old
            text = text.replace(old, new)
        module = Mutant("wrong quantizer", ast.parse(text), "right_quantizer").module()
        return module.Nibbles()  # type: ignore[no-any-return]

    return made


def forward(body: str) -> Callable[[], Backend]:
    """Its layer computes `body`, in which `right` is what is right."""
    right = FORWARD.removeprefix("return ")
    return changed((FORWARD, f"right = {right}\n        {body}"))


ZOO: tuple[Wrong, ...] = (
    # what is stored
    Wrong("halves of a byte exchanged", changed(
        ("flat[:, ::2] + 16 * flat[:, 1::2]", "flat[:, 1::2] + 16 * flat[:, ::2]"),
    ), "neighbouring inputs are exchanged|products are not those"),
    Wrong("scale of the next group", changed(
        ("scales[..., None].float()", "scales.roll(1, 1)[..., None].float()"),
    ), "is off by"),
    Wrong("weights twice as large", changed(
        ("scales[..., None].float()", "2 * scales[..., None].float()"),
    ), "2 times those of the file"),
    Wrong("scale for half of the range", changed(
        ("abs().amax(2) / 7", "abs().amax(2) / 14"),
    ), "cut off|is off by"),
    Wrong("zero point one off", changed(
        ("numbers.float() - 8", "numbers.float() - 7"),
    ), "zero point"),
    Wrong("rounded down", changed(
        (".round().clamp", ".floor().clamp"),
    ), "rounding one way|is off by"),
    Wrong("laid out by columns", changed(
        ("weight.float().unflatten", "weight.float().T.reshape(weight.shape).unflatten"),
    ), "laid out by columns|products are not those"),
    Wrong("other sign", changed(
        ("(groups * scales", "(-groups * scales"),
    ), "other sign|products are not those"),
    Wrong("largest number instead of the largest magnitude", changed(
        ("groups.abs().amax(2) / 7", "groups.amax(2) / 7"),
    ), "is off by|cut off|not finite"),
    Wrong("last group left out", changed(
        ("    return packed.to(torch.uint8)", "    scales[:, -1] = 0\n    return packed.to(torch.uint8)"),
    ), "inputs .* are zero"),
    Wrong("last output left out", changed(
        ("    return packed.to(torch.uint8)", "    scales[-1] = 0\n    return packed.to(torch.uint8)"),
    ), "outputs .* zero|off"),
    Wrong("one scale for the matrix", changed(
        ("groups.abs().amax(2) / 7", "groups.abs().amax().expand(groups.shape[:2]) / 7"),
    ), "off by"),
    Wrong("layers of one shape share the first one's weights", changed(
        ("def quantize(weight", "KEPT = {}\n\n\ndef quantize(weight"),
        ("    groups = weight.float()", "    if weight.shape in KEPT:\n        return KEPT[weight.shape]\n    groups = weight.float()"),
        ("    return packed.to(torch.uint8), scales.bfloat16()", "    KEPT[weight.shape] = packed.to(torch.uint8), scales.bfloat16()\n    return KEPT[weight.shape]"),
    ), "has the weights of|products are not those"),
    Wrong("a second model overwrites the first", changed(
        ("class NibbleConfig(", "SHARED = {}\n\n\nclass NibbleConfig("),
        ("made.packed, made.scales = parts", "SHARED[name] = parts[1]\n        made.packed, made.key = parts[0], name\n        made.scales = parts[1]"),
        ("return dequantize(self.packed, self.scales)", "return dequantize(self.packed, SHARED.get(self.key, self.scales)[: len(self.packed)])"),
    ), "second model"),
    Wrong("random rounding in every call", changed(
        ("return dequantize(self.packed, self.scales)", "found = dequantize(self.packed, self.scales)\n        return found + 0.001 * torch.randn_like(found)"),
    ), "other outputs for the same inputs"),
    Wrong("placeholders never filled", changed(
        ("made.packed, made.scales = parts", "pass"),
    ), "products are not those|zeros"),
    # biases
    Wrong("bias lost", changed((FORWARD, FORWARD.replace("self.bias", "None"))), "bias is missing"),
    Wrong("bias twice", forward("return right if self.bias is None else right + self.bias"), "bias is added twice"),
    # what a layer returns
    Wrong("returns float32", forward("return right.float()"), "float32"),
    Wrong("rows joined", forward("return right.flatten(0, -2)"), r"returns .* where"),
    Wrong("changes its inputs", forward("states.clamp_(-1, 1)\n        return right"), "changes the inputs"),
    Wrong("first outputs for ever", changed(
        (FORWARD, "if not hasattr(self, 'kept') or self.kept[0] != states.shape:\n            self.kept = states.shape, nn.functional.linear(states, self.weight.to(states.dtype), self.bias)\n        return self.kept[1]"),
    ), "first outputs for other inputs|has other outputs|beside"),
    Wrong("one buffer for all outputs", changed(
        (FORWARD, "right = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)\n        kept = vars(self).setdefault('out', {})\n        if right.shape not in kept:\n            kept[right.shape] = torch.empty_like(right)\n        return kept[right.shape].copy_(right)"),
    ), "over those that it returned before"),
    Wrong("rows beyond 512 left out", forward("right[512:] = 0\n        return right"), "rows 512 to 999 of 1000"),
    Wrong("reads strided inputs as if they were dense", changed(
        ("def forward(self, states: torch.Tensor) -> torch.Tensor:", "def forward(self, states: torch.Tensor) -> torch.Tensor:\n        if not states.is_contiguous() and states.dim() == 2 and states.stride(1) != 0:\n            states = states.as_strided(states.shape, (states.shape[1], 1))"),
    ), "dense matrix"),
    Wrong("activations rounded over the whole batch", changed(
        ("def forward(self, states: torch.Tensor) -> torch.Tensor:", "def forward(self, states: torch.Tensor) -> torch.Tensor:\n        step = states.abs().max().clamp(min=1e-9) / 127\n        states = (states / step).round() * step"),
    ), "times as large as its neighbours|row .* alone"),
    Wrong("activations cut off", changed(
        ("def forward(self, states: torch.Tensor) -> torch.Tensor:", "def forward(self, states: torch.Tensor) -> torch.Tensor:\n        states = states.clamp(-6, 6)"),
    ), "times as large as its neighbours"),
    Wrong("repacks in its first step", changed(
        ("def forward(self, states: torch.Tensor) -> torch.Tensor:", "def forward(self, states: torch.Tensor) -> torch.Tensor:\n        self.scales = self.scales.float()"),
    ), "are held|other bits|lost"),
    # what is declared
    Wrong("an error that is too small", changed(("relative_error=0.1", "relative_error=0.03")), "is right"),
    Wrong("bytes of the scales forgotten", changed(
        ("weight.numbers // 2 + weight.numbers // GROUP * 2", "weight.numbers // 2"),
    ), "weight_bytes promised"),
    Wrong("declares batch_invariant", changed(
        ("compiles=True", "compiles=True,\n        batch_invariant=True"),
    ), "batch_invariant"),
    Wrong("declares float16, which its layer does not take", changed(
        ('{"float32", "bfloat16"}', '{"float32", "bfloat16", "float16"}'),
        ("def forward(self, states: torch.Tensor) -> torch.Tensor:", "def forward(self, states: torch.Tensor) -> torch.Tensor:\n        states = states if states.dtype is not torch.float16 else states.float()"),
    ), "float32|float16|same dtype"),
    Wrong("declares adapters", changed(("compiles=True", "compiles=True,\n        adapters=True")), "adapter|lora"),
    Wrong("declares offload", changed(
        ("compiles=True", "compiles=True,\n        offload=True"),
        ("def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:", "def validate_environment(self, *args: Any, device_map: Any = None, **_: Any) -> None:\n        if device_map and 'disk' in device_map.values():\n            raise ValueError('no disk')\n\n    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:"),
    ), "disk"),
    Wrong("declares compiles, and looks at numbers", changed(
        ("def forward(self, states: torch.Tensor) -> torch.Tensor:", "def forward(self, states: torch.Tensor) -> torch.Tensor:\n        if float(states.sum()) > 1e9:\n            return states"),
    ), "cannot be traced"),
    Wrong("refuses nothing", changed(
        ("reasons = super().refuse(requirements, options)", "reasons = []"),
    ), "is planned with it|has no reasons"),
    Wrong("takes what somebody else quantized", changed(
        ('if stored.get("quant_method") != METHOD:', 'if "quant_method" not in stored:'),
    ), "says that it reads"),
    Wrong("reads breaks on what a file may say", changed(
        ('if stored.get("quant_method") != METHOD:', 'if stored["quant_method"].lower() != METHOD:'),
    ), "reads raised"),
    # what is read and written
    Wrong("converts the head too", changed(
        ("return own == \"weight\" and not kept and matrix", "return own == \"weight\" and matrix"),
    ), "weight_bytes promised|not store"),
    Wrong("leaves down_proj whole", changed(
        ("self.kept = self.get_modules_to_not_convert(model, None)", "self.kept = self.get_modules_to_not_convert(model, ['down_proj', *[n for n, _ in model.named_modules() if n.endswith('down_proj')]])"),
    ), "not stored as was planned|promised"),
    Wrong("converts nothing", changed(
        ("return own == \"weight\" and not kept and matrix", "return False and matrix"),
    ), "not stored as was planned|converted none"),
    Wrong("keeps the whole weights", changed(
        ("made.packed, made.scales = parts", "made.packed, made.scales = parts\n        made.whole = [dequantize(*parts)]"),
    ), "no part of the model"),
    Wrong("norms rounded", changed(
        ("        read = getattr(model, \"_weight_conversions\", None) or []", "        for module in model.modules():\n            if 'Norm' in type(module).__name__:\n                module.weight.data = module.weight.data * 0.9\n        read = getattr(model, \"_weight_conversions\", None) or []"),
    ), "numbers of the file"),
    Wrong("the end of the embedding lost", changed(
        ("        read = getattr(model, \"_weight_conversions\", None) or []", "        model.get_input_embeddings().weight.data[9:] = 0\n        read = getattr(model, \"_weight_conversions\", None) or []"),
    ), "numbers of the file"),
    Wrong("scales are not saved", changed(
        ("in_features // GROUP).bfloat16())", "in_features // GROUP).bfloat16(), persistent=False)"),
    ), "lost|broken|promised"),
    Wrong("scales read in the dtype of the model", changed(
        ("        parts[1] = parts[1].bfloat16()  # transformers reads all numbers in the dtype of the model\n", ""),
        ("    scales = (groups.abs().amax(2) / 7).bfloat16().float()", "    scales = (groups.abs().amax(2) / 7).float()"),
        ("return packed.to(torch.uint8), scales.bfloat16()", "return packed.to(torch.uint8), scales"),
        ("in_features // GROUP).bfloat16())", "in_features // GROUP))"),
        ("weight.numbers // GROUP * 2", "weight.numbers // GROUP * 4"),
        ('Form(("BF16",)', 'Form(("F32", "BF16")'),
    ), "read again|other bits|broken"),
    Wrong("bias lost when it is read again", changed(
        ("made = NibbleLinear(linear.in_features, linear.out_features, linear.bias)", "made = NibbleLinear(linear.in_features, linear.out_features, None if self.pre_quantized else linear.bias)"),
    ), "read again|other outputs|lost|broken|other bits"),
    Wrong("auto does not find what it saved", changed(
        ("    def refuse(self, requirements", "    def rank(self, requirements: Any) -> None:\n        return None\n\n    def refuse(self, requirements"),
    ), "is read by|quantized|cannot"),
    Wrong("torch's default dtype left behind", changed(
        ("        self.kept = self", "        torch.set_default_dtype(torch.bfloat16)\n        self.kept = self"),
    ), "default dtype|bfloat16"),
    Wrong("registers itself in engines alone", changed(
        ("        self.register()\n        return NibbleConfig()", "        if context.requirements is not None:\n            self.register()\n        else:\n            AUTO_QUANTIZER_MAPPING.pop(METHOD, None)\n        return NibbleConfig()"),
    ), "raised|unknown|quantization"),
    Wrong("odd fields of a file break it", changed(
        ('    fields: ClassVar[Any] = {"group_size": one_of(GROUP, needed=True)}', '    fields: ClassVar[Any] = {"group_size": Field(lambda given: True, "anything")}'),
        ("import Form, one_of,", "import Field, Form,"),
        ("        self.group_size = group_size\n", "        self.group_size = int(group_size)\n"),
    ), "group_size"),
)  # fmt: skip
