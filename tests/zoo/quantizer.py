"""Wrong quantizers: the right one of `right_quantizer.py` with one thing of it done wrongly."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mutation import Mutant
from wrong import Wrong

from jackfield.contracts import Backend

SOURCE = Path(__file__).with_name("right_quantizer.py").read_text()


def wrong(name: str, words: str, change: str) -> Wrong:
    """`change` has pieces divided by "@": lines with "-" that are there once, and in their place
    those with "+".
    """

    def made() -> Backend:
        text = SOURCE
        for old, new in _pieces(change):
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        module = Mutant(name, ast.parse(text), "right_quantizer").module()
        return module.Nibbles()  # type: ignore[no-any-return]

    return Wrong(name, made, words)


def _pieces(change: str) -> Iterator[tuple[str, str]]:
    for piece in change.strip("\n").split("\n@\n"):
        lines = piece.split("\n")
        old, new = ([line[1:] for line in lines if line[0] == sign] for sign in "-+")
        yield "\n".join(["", *old, ""]), "\n".join(["", *new, ""])


ZOO: tuple[Wrong, ...] = (
    wrong("halves of a byte exchanged",
          r"neighbouring inputs are exchanged|products are not those", """
-    packed = flat[:, ::2] + 16 * flat[:, 1::2]
+    packed = flat[:, 1::2] + 16 * flat[:, ::2]
"""),
    wrong("scale of the next group", r"is off by", """
-    return (groups * scales[..., None].float()).flatten(1)
+    return (groups * scales.roll(1, 1)[..., None].float()).flatten(1)
"""),
    wrong("rows beyond 4096 forgotten", r"rows .* of 4097 are wrong", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        found = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        found.flatten(0, -2)[4096:] = 0
+        return found
"""),
    wrong("weights twice as large", r"2 times those of the file", """
-    return (groups * scales[..., None].float()).flatten(1)
+    return (groups * 2 * scales[..., None].float()).flatten(1)
"""),
    wrong("scale for half of the range", r"cut off|is off by", """
-    scales = (groups.abs().amax(2) / 7).bfloat16().float()
+    scales = (groups.abs().amax(2) / 14).bfloat16().float()
"""),
    wrong("zero point one off", r"zero point", """
-    groups = (numbers.float() - 8).unflatten(1, (-1, GROUP))
+    groups = (numbers.float() - 7).unflatten(1, (-1, GROUP))
"""),
    wrong("rounded down", r"rounding one way|is off by", """
-    numbers = (groups / safe[..., None]).round().clamp(-7, 7).to(torch.int16) + 8
+    numbers = (groups / safe[..., None]).floor().clamp(-7, 7).to(torch.int16) + 8
"""),
    wrong("laid out by columns", r"laid out by columns|products are not those", """
-    groups = weight.float().unflatten(1, (-1, GROUP))
+    groups = weight.float().T.reshape(weight.shape).unflatten(1, (-1, GROUP))
"""),
    wrong("other sign", r"other sign|products are not those", """
-    return (groups * scales[..., None].float()).flatten(1)
+    return (-groups * scales[..., None].float()).flatten(1)
"""),
    wrong("largest number instead of the largest magnitude", r"is off by|cut off|not finite", """
-    scales = (groups.abs().amax(2) / 7).bfloat16().float()
+    scales = (groups.amax(2) / 7).bfloat16().float()
"""),
    wrong("half of the range for a group without a negative number", r"zero or constant|one sign",
          """
-    scales = (groups.abs().amax(2) / 7).bfloat16().float()
+    half = 7 + 7 * (groups >= 0).all(2).float()
+    scales = (groups.abs().amax(2) / half).bfloat16().float()
"""),
    wrong("last group left out", r"inputs .* are zero", """
-    packed = flat[:, ::2] + 16 * flat[:, 1::2]
+    packed = flat[:, ::2] + 16 * flat[:, 1::2]
+    scales[:, -1] = 0
"""),
    wrong("last output left out", r"outputs .* zero|off", """
-    packed = flat[:, ::2] + 16 * flat[:, 1::2]
+    packed = flat[:, ::2] + 16 * flat[:, 1::2]
+    scales[-1] = 0
"""),
    wrong("one scale for the matrix", r"off by", """
-    scales = (groups.abs().amax(2) / 7).bfloat16().float()
+    scales = (groups.abs().amax().expand(groups.shape[:2]) / 7).bfloat16().float()
"""),
    wrong("scales that other outputs decide", r"and .* from what the whole says there", """
-    scales = (groups.abs().amax(2) / 7).bfloat16().float()
+    largest = groups.abs().amax(2)
+    scales = (largest.maximum(0.55 * largest.amax(0)) / 7).bfloat16().float()
"""),
    wrong("a bias that no process can leave out", r"has no attribute `bias`", """
-        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
+        self.added = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
@
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        return nn.functional.linear(states, self.weight.to(states.dtype), self.added)
"""),
    wrong("bytes of a part as of the whole", r"weight_bytes promised .* bytes of a part", """
-            return weight.numbers // 2 + weight.numbers // GROUP * 2
+            numbers = weight.numbers * (3 if weight.whole else 1)
+            return numbers // 2 + numbers // GROUP * 2
"""),
    wrong("layers of one shape share the first one's weights",
          r"has the weights of|products are not those", '''
-GROUP = 16
-
-
+GROUP = 16
+
+
+KEPT = {}
+
+
@
-    """Bytes `[out, in / 2]` of two numbers each, and bfloat16 scales `[out, in / 16]`."""
+    """Bytes `[out, in / 2]` of two numbers each, and bfloat16 scales `[out, in / 16]`."""
+    if weight.shape in KEPT:
+        return KEPT[weight.shape]
@
-    return packed.to(torch.uint8), scales.bfloat16()
+    KEPT[weight.shape] = packed.to(torch.uint8), scales.bfloat16()
+    return KEPT[weight.shape]
'''),
    wrong("a second model overwrites the first", r"second model", """
-        return dequantize(self.packed, self.scales)
+        return dequantize(self.packed, SHARED.get(self.key, self.scales)[: len(self.packed)])
@
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+
+
+SHARED = {}
@
-        made.packed, made.scales = parts
+        SHARED[name] = parts[1]
+        made.packed, made.key = parts[0], name
+        made.scales = parts[1]
"""),
    wrong("random rounding in every call", r"other outputs for the same inputs", """
-        return dequantize(self.packed, self.scales)
+        found = dequantize(self.packed, self.scales)
+        return found + 0.001 * torch.randn_like(found)
"""),
    wrong("placeholders never filled", r"products are not those|zeros", """
-        made.packed, made.scales = parts
+        pass
"""),
    wrong("bias lost", r"bias is missing", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        return nn.functional.linear(states, self.weight.to(states.dtype), None)
"""),
    wrong("bias twice", r"bias is added twice", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        right = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        return right if self.bias is None else right + self.bias
"""),
    wrong("returns float32", r"float32", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        right = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        return right.float()
"""),
    wrong("rows joined", r"returns .* where", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        right = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        return right.flatten(0, -2)
"""),
    wrong("changes its inputs", r"changes the inputs", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        right = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        states.clamp_(-1, 1)
+        return right
"""),
    wrong("first outputs for ever", r"first outputs for other inputs|has other outputs|beside", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        if not hasattr(self, 'kept') or self.kept[0] != states.shape:
+            right = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+            self.kept = states.shape, right
+        return self.kept[1]
"""),
    wrong("one buffer for all outputs", r"over those that it returned before", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        right = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        kept = vars(self).setdefault('out', {})
+        if right.shape not in kept:
+            kept[right.shape] = torch.empty_like(right)
+        return kept[right.shape].copy_(right)
"""),
    wrong("rows beyond 512 left out", r"rows 512 to 999 of 1000", """
-        return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        right = nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
+        right[512:] = 0
+        return right
"""),
    wrong("reads strided inputs as if they were dense", r"dense matrix", """
-    def forward(self, states: torch.Tensor) -> torch.Tensor:
+    def forward(self, states: torch.Tensor) -> torch.Tensor:
+        if not states.is_contiguous() and states.dim() == 2 and states.stride(1) != 0:
+            states = states.as_strided(states.shape, (states.shape[1], 1))
"""),
    wrong("activations rounded over the whole batch",
          r"times as large as its neighbours|row .* alone", """
-    def forward(self, states: torch.Tensor) -> torch.Tensor:
+    def forward(self, states: torch.Tensor) -> torch.Tensor:
+        step = states.abs().max().clamp(min=1e-9) / 127
+        states = (states / step).round() * step
"""),
    wrong("activations cut off", r"times as large as its neighbours", """
-    def forward(self, states: torch.Tensor) -> torch.Tensor:
+    def forward(self, states: torch.Tensor) -> torch.Tensor:
+        states = states.clamp(-6, 6)
"""),
    wrong("repacks in its first step", r"are held|other bits|lost", """
-    def forward(self, states: torch.Tensor) -> torch.Tensor:
+    def forward(self, states: torch.Tensor) -> torch.Tensor:
+        self.scales = self.scales.float()
"""),
    wrong("an error that is too small", r"is right", """
-        relative_error=0.1,
+        relative_error=0.03,
"""),
    wrong("bytes of the scales forgotten", r"weight_bytes promised", """
-            return weight.numbers // 2 + weight.numbers // GROUP * 2
+            return weight.numbers // 2
"""),
    wrong("declares batch_invariant", r"batch_invariant", """
-        compiles=True,
+        compiles=True,
+        batch_invariant=True,
"""),
    wrong("declares float16, which its layer does not take", r"float32|float16|same dtype", """
-    def forward(self, states: torch.Tensor) -> torch.Tensor:
+    def forward(self, states: torch.Tensor) -> torch.Tensor:
+        states = states if states.dtype is not torch.float16 else states.float()
@
-        dtypes=frozenset({"float32", "bfloat16"}),
+        dtypes=frozenset({"float32", "bfloat16", "float16"}),
"""),
    wrong("declares adapters", r"adapter|lora", """
-        compiles=True,
+        compiles=True,
+        adapters=True,
"""),
    wrong("declares offload", r"disk", """
-class NibbleHfQuantizer(HfQuantizer):
+class NibbleHfQuantizer(HfQuantizer):
+    def validate_environment(self, *args: Any, device_map: Any = None, **_: Any) -> None:
+        if device_map and 'disk' in device_map.values():
+            raise ValueError('no disk')
+
@
-        compiles=True,
+        compiles=True,
+        offload=True,
"""),
    wrong("declares compiles, and looks at numbers", r"cannot be traced", """
-    def forward(self, states: torch.Tensor) -> torch.Tensor:
+    def forward(self, states: torch.Tensor) -> torch.Tensor:
+        if float(states.sum()) > 1e9:
+            return states
"""),
    wrong("refuses nothing", r"is planned with it|`refuse` accepts", """
-        reasons = super().refuse(requirements, options)
+        reasons = []
"""),
    wrong("takes what somebody else quantized", r"says that it reads", """
-        if stored.get("quant_method") != METHOD:
+        if "quant_method" not in stored:
"""),
    wrong("reads breaks on what a file may say", r"reads raised", """
-        if stored.get("quant_method") != METHOD:
+        if stored["quant_method"].lower() != METHOD:
"""),
    wrong("converts the head too", r"weight_bytes promised|not store", """
-        return own == "weight" and not kept and matrix(model.get_submodule(path))
+        return own == "weight" and matrix(model.get_submodule(path))
"""),
    wrong("leaves down_proj whole", r"not stored as was planned|promised", """
-        self.kept = self.get_modules_to_not_convert(model, None)
+        self.kept = self.get_modules_to_not_convert(model, None)
+        self.kept += [n for n, _ in model.named_modules() if n.endswith('down_proj')]
"""),
    wrong("converts nothing", r"not stored as was planned|converted none", """
-        return own == "weight" and not kept and matrix(model.get_submodule(path))
+        return False and matrix(model.get_submodule(path))
"""),
    wrong("keeps the whole weights", r"no part of the model", """
-        made.packed, made.scales = parts
+        made.packed, made.scales = parts
+        made.whole = [dequantize(*parts)]
"""),
    wrong("norms rounded", r"numbers of the file", """
-    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
+    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
+        for module in model.modules():
+            if 'Norm' in type(module).__name__:
+                module.weight.data = module.weight.data * 0.9
"""),
    wrong("the end of the embedding lost", r"numbers of the file", """
-    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
+    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
+        model.get_input_embeddings().weight.data[9:] = 0
"""),
    wrong("scales are not saved", r"lost|broken|promised|products are not those", """
-        self.register_buffer("scales", torch.zeros(out_features, in_features // GROUP).bfloat16())
+        scales = torch.zeros(out_features, in_features // GROUP).bfloat16()
+        self.register_buffer("scales", scales, persistent=False)
"""),
    wrong("scales read in the dtype of the model", r"read again|other bits|broken", """
-    scales = (groups.abs().amax(2) / 7).bfloat16().float()
+    scales = (groups.abs().amax(2) / 7).float()
@
-    return packed.to(torch.uint8), scales.bfloat16()
+    return packed.to(torch.uint8), scales
@
-        self.register_buffer("scales", torch.zeros(out_features, in_features // GROUP).bfloat16())
+        self.register_buffer("scales", torch.zeros(out_features, in_features // GROUP))
@
-        parts[1] = parts[1].bfloat16()  # transformers reads all numbers in the dtype of the model
@
-            return weight.numbers // 2 + weight.numbers // GROUP * 2
+            return weight.numbers // 2 + weight.numbers // GROUP * 4
@
-            f"{path}.scales": Form(("BF16",), (rows, columns // GROUP)),
+            f"{path}.scales": Form(("F32", "BF16"), (rows, columns // GROUP)),
"""),
    wrong("bias lost when it is read again", r"read again|other outputs|lost|broken|other bits", """
-        made = NibbleLinear(linear.in_features, linear.out_features, linear.bias)
+        bias = None if self.pre_quantized else linear.bias
+        made = NibbleLinear(linear.in_features, linear.out_features, bias)
"""),
    wrong("auto does not find what it saved", r"is read by|quantized|cannot", """
-        self.register()
-        return True
-
+        self.register()
+        return True
+
+    def rank(self, requirements: Any) -> None:
+        return None
+
"""),
    wrong("torch's default dtype left behind", r"default dtype|bfloat16", """
-    def converted(self, module: nn.Module) -> bool:
+    def converted(self, module: nn.Module) -> bool:
+        torch.set_default_dtype(torch.bfloat16)
"""),
    wrong("registers itself in engines alone", r"raised|unknown|quantization", """
-    def make_config(self, context: Any) -> NibbleConfig:
-        self.register()
+    def make_config(self, context: Any) -> NibbleConfig:
+        if context.requirements is not None:
+            self.register()
+        else:
+            AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
"""),
)  # fmt: skip
