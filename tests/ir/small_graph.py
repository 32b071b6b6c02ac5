"""A small graph with every kind of line, as text: two layers' worth of state is not needed."""

TEXT = """\
graph decode
  input %token_id: i32[R]
  input %slot: i32[R]
  input %position: i32[R]
  weight %embed: bf16[6,32] from "embed.weight"
  weight %w: bf16[32] from "layers.0.norm \\"w\\".weight"
  weight %wv: bf16[4,32] from "layers.0.compressor.wkv.weight"
  weight %wg: bf16[4,32] from "layers.0.compressor.wgate.weight"
  state %tail: !f32[3,4,2,4]
  state %window.0: !mxfp8[3,4,32]
  %x: bf16[R,32] = embed %token_id, %embed {out=bf16}  # at="nano.yaml:3 model" passes=build
  %y: bf16[R,32] = rmsnorm %x, %w {eps=1e-20}  # layer=0 at="a.yaml:9 \\"m\\"" passes=build,fuse-x
  %kv: mxfp8[R,32] = quantize %y {to=mxfp8}  # layer=0
  %window.1: !mxfp8[3,4,32] = ring_store %window.0, %slot, %position, %kv
  %v: f32[R,4] = linear %y, %wv {out=f32}
  %g: f32[R,4] = linear %y, %wg {out=f32}
  %tail.1: !f32[3,4,2,4] = ring_store %tail, %slot, %position, %v, %g
  %pooled: f32[R,4] = pool_group %tail.1, %slot, %position {ratio=2, out=f32}
  return %pooled, %kv
"""
