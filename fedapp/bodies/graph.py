"""A pretrained body and a head on its features as one ONNX graph, from raw samples to logits.

| samples  | inputs                                         | before the body             | after it                   |
|----------|------------------------------------------------|-----------------------------|----------------------------|
| pictures | `raw` uint8 (n, h, w, c), of any size, grey or | bilinear, then mean and std | mean over positions        |
|          | in colour, levels 0 .. 255                     |                             |                            |
| texts    | `input_ids`, `attention_mask` int64 (n, t)     | -                           | mean over tokens, norm 1   |

The graph computes what :class:`fedapp.bodies.extractor.Extractor` computes. It does not round features to float16.
"""

from __future__ import annotations

from typing import Any

from fedapp.bodies.extractor import INPUTS, Extractor
from fedapp.errors import BadRequest

OPSET = 18
"""The oldest version of the operators below."""

_PICTURES = """
before (uint8[n, h, w, c] raw) => (float[n, channels, side, side] raw_ready)
<float[{moments}, 1, 1] raw_mean = {{{mean}}}, float[{deviations}, 1, 1] raw_std = {{{std}}},
 int64[4] raw_shape = {{1, {channels}, 1, 1}}, int64[2] raw_sides = {{{side}, {side}}}>
{{
  raw_levels = Cast <to = 1> (raw)
  raw_first = Transpose <perm = [0, 3, 1, 2]> (raw_levels)
  raw_channels = Expand (raw_first, raw_shape)
  raw_sized = Resize <mode = "linear", coordinate_transformation_mode = "half_pixel", axes = [2, 3]>
              (raw_channels, , , raw_sides)
  raw_centred = Sub (raw_sized, raw_mean)
  raw_ready = Div (raw_centred, raw_std)
}}
"""
_TEXTS = """
before (int64[n, t] input_ids, int64[n, t] attention_mask) => (
  int64[n, t] raw_input_ids, int64[n, t] raw_attention_mask, int64[n, t] raw_token_type_ids, float[n, t, 1] raw_weight
) <int64[1] raw_last = {2}>
{
  raw_input_ids = Identity (input_ids)
  raw_attention_mask = Identity (attention_mask)
  raw_token_type_ids = Sub (input_ids, input_ids)
  raw_ones = Cast <to = 1> (attention_mask)
  raw_weight = Unsqueeze (raw_ones, raw_last)
}
"""
_POSITIONS = """
after (float[n, width, h, w] z) => (float[n, width] z_features) <int64[2] z_axes = {2, 3}>
{ z_features = ReduceMean <keepdims = 0> (z, z_axes) }
"""
_TOKENS = """
after (float[n, t, width] z, float[n, t, 1] weight) => (float[n, width] z_features)
<int64[1] z_tokens = {1}, float z_one = {1}, float z_least = {1e-12}>
{
  z_weighted = Mul (z, weight)
  z_sum = ReduceSum <keepdims = 0> (z_weighted, z_tokens)
  z_count = ReduceSum <keepdims = 0> (weight, z_tokens)
  z_some = Max (z_count, z_one)
  z_mean = Div (z_sum, z_some)
  z_norm = ReduceL2 (z_mean, z_tokens)
  z_above = Max (z_norm, z_least)
  z_features = Div (z_mean, z_above)
}
"""


def joined(extractor: Extractor, head: Any) -> Any:
    """Join a body and a head.

    Parameters
    ----------
    extractor : after `fit`.   head : `onnx.ModelProto` with the input `features` float32 (n, width), any n.

    Returns
    -------
    `onnx.ModelProto` with the outputs of the head.

    Raises
    ------
    BadRequest : the body takes a fixed number of samples, or it pools texts by itself.
    """
    import onnx
    from onnx import compose, version_converter

    body = extractor.body
    texts = body.tokenizer is not None
    if extractor.batch or (texts and body.pooling != "mean"):
        what = f"takes {extractor.batch} samples at a time" if extractor.batch else "returns no tokens"
        raise BadRequest(f"the body '{body.name}' {what}, and a joined graph takes any number of them: export it again")
    loaded = onnx.load(extractor.file)
    opset = max(OPSET, *(o.version for m in (loaded, head) for o in m.opset_import if o.domain in ("", "ai.onnx")))
    core, head = (version_converter.convert_version(model, opset) for model in (loaded, head))
    core = compose.add_prefix(core, "body/")
    core.ir_version = head.ir_version = version = max(core.ir_version, head.ir_version)

    def parsed(text: str) -> Any:
        return onnx.parser.parse_model(f'<ir_version: {version}, opset_import: ["" : {opset}]>{text}')

    z = core.graph.output[0].name
    if texts:
        inputs = [(f"raw_{name}", f"body/{name}") for name in INPUTS if name in extractor.inputs]
        model = compose.merge_models(parsed(_TEXTS), core, inputs, outputs=["raw_weight", z])
    else:
        levels = {key: ", ".join(map(str, numbers)) for key, numbers in (("mean", body.mean), ("std", body.std))}
        numbers = {"moments": len(body.mean), "deviations": len(body.std)}
        text = _PICTURES.format(channels=extractor.channels, side=body.size, **numbers, **levels)
        inputs = [("raw_ready", f"body/{name}") for name in extractor.inputs]
        model = compose.merge_models(parsed(text), core, inputs, outputs=[z])
    if body.pooling == "mean":
        after, links = (_TOKENS, [(z, "z"), ("raw_weight", "weight")]) if texts else (_POSITIONS, [(z, "z")])
        model, z = compose.merge_models(model, parsed(after), links), "z_features"
    return compose.merge_models(model, head, [(z, "features")])
