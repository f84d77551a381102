"""The architecture of a decoder, and its Hugging Face `config.json`."""

from collections.abc import Mapping
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are changed for long contexts.

  `kind` is one of ROPE_FIELDS; the fields that it does not list are unused.
  """

  kind: str
  factor: float
  original_max_positions: int = 0  # tokens
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None  # None: derived from `factor`
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder's architecture; hashable, so it can be a static argument."""

  vocab_size: int
  d_model: int
  d_mlp: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_positions: int = 2048  # tokens of prompt and response
  family: str = 'llama'
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-5
  tied_embeddings: bool = True  # the output head is the embedding
  attention_bias: bool = False  # of q, k and v
  output_bias: bool = False  # of the attention's output projection
  mlp_bias: bool = False
  init_std: float = 0.02
  sliding_window: int = 0  # tokens, see `windows`; 0: no layer slides
  sliding_layers: tuple[int, ...] = ()  # ascending numbers of those that do

  @property
  def windows(self) -> tuple[int, ...]:
    """Of each of the G layers: tokens that a token sees, itself one of them.

    0 is all of them: the layer does not slide.
    """
    return tuple(
      self.sliding_window if layer in self.sliding_layers else 0
      for layer in range(self.num_layers)
    )

  def __post_init__(self):
    # A list from a JSON file would not be hashable.
    object.__setattr__(self, 'sliding_layers', tuple(self.sliding_layers))
    if self.family not in FAMILIES:
      raise ValueError(
        f'unknown model family {self.family!r}; one of {sorted(FAMILIES)}.'
      )
    for name in _SIZES:
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f'{name} is {value!r}; it must be an integer >= 1.')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} is not a multiple of'
        f' num_kv_heads={self.num_kv_heads}; every key/value head must serve'
        ' the same number of query heads.'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim={self.head_dim} is odd; rotary positions turn pairs of'
        ' dimensions, so make it even.'
      )
    biases = self.attention_bias, self.output_bias, self.mlp_bias
    if self.family == 'qwen2' and biases != (True, False, False):
      raise ValueError(
        'qwen2 has biases on q, k and v and nowhere else; got attention_bias,'
        f' output_bias, mlp_bias = {biases}. Use (True, False, False).'
      )
    if self.family == 'mistral' and any(biases):
      raise ValueError(
        'mistral has no biases; got attention_bias, output_bias, mlp_bias ='
        f' {biases}.'
      )
    if self.family == 'llama' and self.attention_bias != self.output_bias:
      raise ValueError(
        'llama has attention biases on q, k, v and o or on none; got'
        f' attention_bias={self.attention_bias},'
        f' output_bias={self.output_bias}.'
      )
    self._check_windows()

  def _check_windows(self):
    window, sliding = self.sliding_window, self.sliding_layers
    if (
      not isinstance(window, int)
      or window < 0
      or ((window > 0) != (len(sliding) > 0))
    ):
      raise ValueError(
        f'sliding_window={window} with sliding_layers={sliding}: expected'
        ' 1 or more tokens and the layers that slide, or 0 and none.'
      )
    if list(sliding) != sorted(set(sliding) & set(range(self.num_layers))):
      raise ValueError(
        f'sliding_layers={sliding}: expected different layers of'
        f' 0..{self.num_layers - 1}, ascending.'
      )
    if sliding and self.family == 'llama':
      raise ValueError(
        f'llama has no sliding windows, got sliding_window={window}; mistral'
        ' is the same with one in every layer.'
      )
    if self.family == 'mistral' and len(sliding) not in (0, self.num_layers):
      raise ValueError(
        'mistral slides in all layers or in none; got'
        f' sliding_layers={sliding} of {self.num_layers} layers.'
      )


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """The config of a Hugging Face `config.json`.

  Reads the rotary settings of transformers 5 (`rope_parameters`) and of
  earlier versions (`rope_theta` and `rope_scaling`).

  Raises:
    ValueError: a family, activation, rotary scaling or attention pattern that
      the decoder does not compute exactly, or a missing key.
  """
  model_type = hf.get('model_type')
  if model_type not in FAMILIES:
    raise ValueError(
      f'model_type {model_type!r} is not supported; one of {sorted(FAMILIES)}.'
    )
  needed = _HF_SIZES
  if model_type == 'mistral':  # where it is missing, transformers takes 8
    needed = *needed, 'num_key_value_heads'
  missing = [k for k in needed if k not in hf]
  if missing:
    raise ValueError(f'config.json lacks {missing}; is the file complete?')
  _refuse_unsupported(hf)
  theta, scaling = _rope_from_hf(hf)
  heads = hf['num_attention_heads']
  llama = model_type == 'llama'
  attention_bias = llama and bool(hf.get('attention_bias', False))
  window, sliding = _windows_from_hf(hf)
  return ModelConfig(
    family=model_type,
    vocab_size=hf['vocab_size'],
    d_model=hf['hidden_size'],
    d_mlp=hf['intermediate_size'],
    num_layers=hf['num_hidden_layers'],
    num_heads=heads,
    num_kv_heads=hf.get('num_key_value_heads') or heads,
    head_dim=hf.get('head_dim') or _head_dim(hf['hidden_size'], heads),
    max_positions=hf.get(
      'max_position_embeddings', FAMILIES[model_type]['max_positions']
    ),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=float(hf.get('rms_norm_eps', 1e-6)),
    tied_embeddings=bool(hf.get('tie_word_embeddings', False)),
    attention_bias=attention_bias or model_type == 'qwen2',
    output_bias=attention_bias,
    mlp_bias=llama and bool(hf.get('mlp_bias', False)),
    init_std=float(hf.get('initializer_range', 0.02)),
    sliding_window=window,
    sliding_layers=sliding,
  )


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """The `config.json` of a config, readable by transformers 4 and 5."""
  hf = {
    'architectures': [FAMILIES[config.family]['policy']],
    'model_type': config.family,
    'vocab_size': config.vocab_size,
    'hidden_size': config.d_model,
    'intermediate_size': config.d_mlp,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'max_position_embeddings': config.max_positions,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_eps,
    'initializer_range': config.init_std,
    'tie_word_embeddings': config.tied_embeddings,
    'attention_dropout': 0.0,
    'rope_theta': config.rope_theta,
    'rope_scaling': _rope_to_hf(config.rope_scaling),
  }
  if config.family == 'llama':
    hf['attention_bias'] = config.attention_bias
    hf['mlp_bias'] = config.mlp_bias
  if config.family == 'mistral':
    hf['sliding_window'] = config.sliding_window or None
  if config.family == 'qwen2':
    hf['use_sliding_window'] = bool(config.sliding_window)
  if config.family == 'qwen2' and config.sliding_window:
    hf['sliding_window'] = config.sliding_window
    # Read by transformers before 4.53, which knows no other pattern.
    hf['max_window_layers'] = config.sliding_layers[0]
    hf['layer_types'] = [
      'sliding_attention' if window else 'full_attention'
      for window in config.windows
    ]
  return hf


def _head_dim(hidden_size: int, heads: int) -> int:
  if hidden_size % heads:
    raise ValueError(
      f'hidden_size={hidden_size} is not a multiple of'
      f' num_attention_heads={heads} and config.json has no head_dim.'
    )
  return hidden_size // heads


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
  """Raises where the decoder would silently compute something else."""
  activation = hf.get('hidden_act', 'silu')
  if activation not in ('silu', 'swish'):
    raise ValueError(f'hidden_act {activation!r} is not supported; only silu.')
  if hf.get('quantization_config'):
    raise ValueError(
      'the checkpoint is quantised (quantization_config); use the float one.'
    )


def _windows_from_hf(hf: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
  """The window in tokens and the layers that slide, (0, ()) for none.

  A file may give the layers as a list of types, or, as older Qwen2 files do, by
  a number: those from `max_window_layers` on.
  """
  family, layers = hf['model_type'], hf['num_hidden_layers']
  types = hf.get('layer_types')
  window = {
    'llama': None,
    # The defaults of transformers, where the file says nothing.
    'mistral': hf.get('sliding_window', 4096),
    'qwen2': hf.get('use_sliding_window') and hf.get('sliding_window', 4096),
  }[family]
  if types is None or family == 'mistral':
    first = 0 if family == 'mistral' else hf.get('max_window_layers', 28)
    kinds = ['full_attention'] * min(first, layers)
    kinds += ['sliding_attention'] * (layers - len(kinds))
    if not window:
      kinds = ['full_attention'] * layers
    if family == 'mistral' and types not in (None, kinds):
      raise ValueError(
        f'mistral with layer_types={types} is not supported; transformers does'
        ' not compute it either.'
      )
    types = kinds
  unknown = set(types) - {'full_attention', 'sliding_attention'}
  if unknown or len(types) != layers:
    raise ValueError(
      f'layer_types={types}: expected full_attention or sliding_attention for'
      f' each of {layers} layers.'
    )
  sliding = tuple(
    layer for layer, kind in enumerate(types) if kind == 'sliding_attention'
  )
  if sliding and not window:
    raise ValueError(
      f'layer_types has sliding layers {sliding}, but there is no window'
      f' ({family}, use_sliding_window={hf.get("use_sliding_window")},'
      f' sliding_window={hf.get("sliding_window")}).'
    )
  return (int(window), sliding) if sliding else (0, ())


def _rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  rope = dict(hf.get('rope_scaling') or {})
  rope.update(hf.get('rope_parameters') or {})
  theta = float(rope.pop('rope_theta', hf.get('rope_theta') or 10000.0))
  kind = rope.pop('rope_type', rope.pop('type', 'default'))
  rope.pop('type', None)
  if rope.pop('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError('partial_rotary_factor != 1 is not supported.')
  if kind == 'default':
    return theta, None
  if kind not in ROPE_FIELDS:
    raise ValueError(
      f'rope type {kind!r} is not supported; one of'
      f' {sorted(ROPE_FIELDS)} or default.'
    )
  if 'original_max_position_embeddings' in ROPE_FIELDS[kind]:
    rope.setdefault(
      'original_max_position_embeddings',
      hf.get('original_max_position_embeddings')
      or hf.get('max_position_embeddings', 2048),
    )
  known = {k: rope.pop(k) for k in ROPE_FIELDS[kind] if k in rope}
  if rope:
    raise ValueError(
      f'rope type {kind!r}: unknown settings {rope}; known are'
      f' {ROPE_FIELDS[kind]}.'
    )
  if known.get('factor') is None:
    raise ValueError(f"rope type {kind!r} needs 'factor'; got {known}.")
  # null in the file means the default of the field
  fields = {_OUR_NAME.get(k, k): v for k, v in known.items() if v is not None}
  return theta, RopeScaling(kind=kind, **fields)


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
  if scaling is None:
    return None
  fields = {
    k: getattr(scaling, _OUR_NAME.get(k, k)) for k in ROPE_FIELDS[scaling.kind]
  }
  return {
    'rope_type': scaling.kind,
    **{k: v for k, v in fields.items() if v is not None},
  }


# Per family: the class that transformers loads an actor or a critic with, and
# the context length where the file does not say one.
FAMILIES: dict[str, dict[str, Any]] = {
  'llama': dict(
    policy='LlamaForCausalLM',
    value='LlamaForSequenceClassification',
    max_positions=2048,
  ),
  'mistral': dict(
    policy='MistralForCausalLM',
    value='MistralForSequenceClassification',
    max_positions=131072,
  ),
  'qwen2': dict(
    policy='Qwen2ForCausalLM',
    value='Qwen2ForSequenceClassification',
    max_positions=32768,
  ),
}

# The settings of each rotary scaling, by their names in config.json.
# 'dynamic' is left out on purpose: its frequencies depend on the length of the
# whole sequence, so cached decoding cannot equal the full forward pass.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
  'linear': ('factor',),
  'llama3': (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  ),
  'yarn': (
    'factor',
    'original_max_position_embeddings',
    'beta_fast',
    'beta_slow',
    'attention_factor',
    'mscale',
    'mscale_all_dim',
    'truncate',
  ),
}

_OUR_NAME = {'original_max_position_embeddings': 'original_max_positions'}
_SIZES = (
  'vocab_size',
  'd_model',
  'd_mlp',
  'num_layers',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'max_positions',
)
_HF_SIZES = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
)
