"""Packs sequences into rows of tokens, and unpacks them again.

Runs on the host in numpy.  `plan` decides once where every token goes; the
other functions only look up its index map, so they cannot disagree.

The one-left shift of the time convention (see `types`) is done here and only
here.  For two sequences `a` (prompt a0 a1, actions a2 a3) and `b` (prompt b0,
action b1) in one row of 7 tokens:

  tokens       a0 a1 a2 a3 b0 b1  .
  segment_ids   1  1  1  1  2  2  0
  positions     0  1  2  3  0  1  0
  targets      a1 a2 a3  0 b1  0  0
  mask          0  1  1  0  1  0  0    the target is an action
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from rlhf_jax import types


@dataclasses.dataclass(frozen=True)
class PackMap:
  """Where every token of `[N, T]` is in `[R, L]`, and the way back."""

  source: np.ndarray  # [R, L] int32: flat n * T + t, -1 at padding
  slot: np.ndarray  # [N, T] int32: flat r * L + l, -1 past the end
  segment_ids: np.ndarray  # [R, L] int32: as `types.Rows.segment_ids`
  lengths: np.ndarray  # [N] int32
  prefix_length: int  # tokens that all sequences share, once per row


def plan(
  lengths: np.ndarray,
  width: int,
  tokens_per_row: int,
  *,
  rows_multiple: int = 1,
  prefix_length: int = 0,
) -> PackMap:
  """Places sequences into rows by first-fit-decreasing; deterministic.

  With `prefix_length` P > 0 the first P tokens of all sequences are taken to
  be equal (see `common_prefix`): each used row starts with one copy of them,
  marked SHARED, and a sequence adds only its tokens from P on.

  Args:
    lengths: [N] int, tokens of each sequence, more than `prefix_length`.
    width: T, the columns of the sequence layout.
    tokens_per_row: L.
    rows_multiple: R is padded with empty rows to a multiple of this.
    prefix_length: P.

  Returns:
    The map, with the fewest rows that first-fit-decreasing finds.

  Raises:
    ValueError: nothing to pack, a length out of range, or a sequence longer
      than a row.
  """
  lengths = np.asarray(lengths, np.int64)
  _check_plan(lengths, width, tokens_per_row, rows_multiple, prefix_length)
  capacity = tokens_per_row - prefix_length
  members = _first_fit_decreasing(lengths - prefix_length, capacity)
  num_rows = -(-len(members) // rows_multiple) * rows_multiple
  num_sequences = len(lengths)
  if max(num_rows * tokens_per_row, num_sequences * width) >= 2**31:
    raise ValueError(
      f'the index map is int32: got {num_rows} rows of {tokens_per_row} and'
      f' {num_sequences} sequences of {width} tokens; pack fewer at once'
    )

  source = np.full((num_rows, tokens_per_row), -1, np.int32)  # R L
  slot = np.full((num_sequences, width), -1, np.int32)  # N T
  segment_ids = np.full(source.shape, types.PADDING, np.int32)  # R L
  for row, sequences in enumerate(members):
    start = row * tokens_per_row
    prefix = np.arange(prefix_length)
    source[row, :prefix_length] = sequences[0] * width + prefix
    segment_ids[row, :prefix_length] = types.SHARED
    place = prefix_length
    for segment, n in enumerate(sequences, start=1):
      end = place + lengths[n] - prefix_length
      own = np.arange(prefix_length, lengths[n])
      source[row, place:end] = n * width + own
      segment_ids[row, place:end] = segment
      slot[n, :prefix_length] = start + prefix
      slot[n, own] = start + np.arange(place, end)
      place = end
  return PackMap(
    source, slot, segment_ids, lengths.astype(np.int32), prefix_length
  )


def nothing(width: int, rows: int, tokens_per_row: int) -> PackMap:
  """The plan of no sequences: empty rows."""
  return PackMap(
    source=np.full((rows, tokens_per_row), -1, np.int32),
    slot=np.zeros((0, width), np.int32),
    segment_ids=np.full((rows, tokens_per_row), types.PADDING, np.int32),
    lengths=np.zeros(0, np.int32),
    prefix_length=0,
  )


def with_rows(pack_map: PackMap, order: np.ndarray) -> PackMap:
  """The same sequences with the rows in another order.

  Args:
    pack_map: from `plan`, R rows.
    order: [R'] int: the row that comes to each place, -1 for an empty one;
      every row that holds a token is in it once.
  """
  rows, tokens_per_row = pack_map.source.shape
  of = lambda array, fill: np.where(
    order[:, None] >= 0, array[order], np.asarray(fill, array.dtype)
  )
  place = np.zeros(rows, np.int64)  # row -> its new place
  place[order[order >= 0]] = np.flatnonzero(order >= 0)
  row, column = np.divmod(np.maximum(pack_map.slot, 0), tokens_per_row)
  slot = place[row] * tokens_per_row + column
  return dataclasses.replace(
    pack_map,
    source=of(pack_map.source, -1),
    segment_ids=of(pack_map.segment_ids, types.PADDING),
    slot=np.where(pack_map.slot >= 0, slot, -1).astype(np.int32),
  )


def work(
  pack_map: PackMap, cost: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
  """What each row costs: the sum over its sequences, [R] float64.

  Args:
    pack_map: from `plan`.
    cost: of sequences of [N] tokens; linear plus quadratic.
  """
  per_row = np.zeros(len(pack_map.source))
  first = pack_map.prefix_length  # the shared prefix is in every row
  rows = pack_map.slot[:, first] // pack_map.source.shape[1]
  np.add.at(per_row, rows, cost(pack_map.lengths.astype(np.float64)))
  return per_row


def balance(work: np.ndarray, bins: int, capacity: int) -> np.ndarray:
  """Deals rows into bins of equal size and about equal work.

  The heaviest row left goes to the bin with the least work that has room (the
  longest-processing-time rule: at most 4/3 of the best possible maximum, where
  room is no limit; Graham 1969).

  Args:
    work: [R] float, of each row; R <= bins * capacity.
    bins: number of bins.
    capacity: rows of a bin.

  Returns:
    [bins * capacity] int: rows by bin, -1 for none, heaviest bins first.
  """
  out = np.full((bins, capacity), -1)
  total, used = np.zeros(bins), np.zeros(bins, int)
  for row in np.argsort(-np.asarray(work), kind='stable'):
    chosen = int(np.argmin(np.where(used < capacity, total, np.inf)))
    out[chosen, used[chosen]] = row
    total[chosen] += work[row]
    used[chosen] += 1
  return out[np.argsort(-total, kind='stable')].reshape(-1)


def _check_plan(lengths, width, tokens_per_row, rows_multiple, prefix_length):
  """Raises a ValueError for arguments of `plan` that cannot be packed."""
  if lengths.ndim != 1 or lengths.size == 0:
    raise ValueError(
      f'lengths must be [N] with N > 0, got shape {lengths.shape}: there is'
      ' nothing to pack'
    )
  if rows_multiple < 1 or prefix_length < 0:
    raise ValueError(
      'expected rows_multiple >= 1 and prefix_length >= 0, got'
      f' {rows_multiple} and {prefix_length}'
    )
  shortest, longest = int(lengths.argmin()), int(lengths.argmax())
  if lengths[shortest] <= prefix_length:
    raise ValueError(
      f'sequence {shortest} has {lengths[shortest]} tokens, expected more than'
      f' the {prefix_length} of the shared prefix'
    )
  if lengths[longest] > width:
    raise ValueError(
      f'sequence {longest} has length {lengths[longest]}, but the arrays are'
      f' only {width} wide'
    )
  if lengths[longest] > tokens_per_row:
    raise ValueError(
      f'sequence {longest} has {lengths[longest]} tokens, but a row holds'
      f' {tokens_per_row} and a sequence never spans rows: raise'
      ' tokens_per_row or limit the length of prompts and responses'
    )


def _first_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
  """Returns for each bin the items in it, the largest first."""
  members: list[list[int]] = []
  free = np.zeros(len(sizes), np.int64)  # of the bins opened so far
  for item in np.argsort(-sizes, kind='stable'):
    fits = free[: len(members)] >= sizes[item]
    if fits.any():
      chosen = int(fits.argmax())
      members[chosen].append(int(item))
    else:
      chosen = len(members)
      members.append([int(item)])
      free[chosen] = capacity
    free[chosen] -= sizes[item]
  return members


def pack(array: np.ndarray, pack_map: PackMap, fill=0) -> np.ndarray:
  """Moves per-action numbers to the tokens that predict them.

  rows[place of token t of sequence n] = array[n, t + 1]

  Args:
    array: [N, T] of any dtype, in the time convention of the project.
    pack_map: from `plan`.
    fill: stands at the last token of a sequence, at SHARED places and at
      padding.

  Returns:
    [R, L] of the dtype of `array`.
  """
  array = np.asarray(array)
  _check_shape('array', array, pack_map.slot)
  source, width = pack_map.source, array.shape[1]
  owned = pack_map.segment_ids > 0
  sequence, position = np.divmod(np.where(owned, source, 0), width)
  has_next = owned & (position + 1 < _flat(pack_map.lengths)[sequence])  # R L
  following = np.where(has_next, source + 1, 0)
  fill = np.asarray(fill, array.dtype)
  return np.where(has_next, _flat(array)[following], fill)


def unpack(rows: np.ndarray, pack_map: PackMap, fill=0) -> np.ndarray:
  """Moves numbers per token of a row back to the actions they speak of.

  array[n, t] = rows[place of token t - 1 of sequence n]

  The inverse of `pack` at every token after the first (after the shared
  prefix and one more, where there is one).

  Args:
    rows: [R, L] of any dtype.
    pack_map: from `plan`.
    fill: stands at the first token and past the end of each sequence.

  Returns:
    [N, T] of the dtype of `rows`.
  """
  rows = np.asarray(rows)
  _check_shape('rows', rows, pack_map.source)
  width = pack_map.slot.shape[1]
  is_token = np.arange(width) < pack_map.lengths[:, None]  # N T
  is_token[:, 0] = False
  # [3 4 5] -> [? 3 4]: entry t from the place of token t - 1.
  previous = np.roll(pack_map.slot, 1, axis=1)
  values = rows.reshape(-1)[np.where(is_token, previous, 0)]
  return np.where(is_token, values, np.asarray(fill, rows.dtype))


def last(rows: np.ndarray, pack_map: PackMap) -> np.ndarray:
  """Reads each sequence's last token: [R, L] -> [N].

  Of a critic's rows this is the value after the whole sequence, which is what
  a sequence cut by the length limit bootstraps from.
  """
  rows = np.asarray(rows)
  _check_shape('rows', rows, pack_map.source)
  index = pack_map.lengths - 1
  return rows.reshape(-1)[pack_map.slot[np.arange(len(index)), index]]


def rows(rollout: types.Rollout, pack_map: PackMap) -> types.Rows:
  """Builds the model's input from a rollout.

  Args:
    rollout: N sequences of width T, as `plan` was told.
    pack_map: from `plan`.

  Returns:
    Rows of numpy arrays; the temperature is 1 at padding and SHARED places.

  Raises:
    ValueError: the lengths are not those of the plan, or an action would be
      lost: at position 0, within the shared prefix, or past the end.
  """
  tokens = np.asarray(rollout.tokens, np.int32)  # N T
  mask = np.asarray(rollout.mask, bool)  # N T
  lengths = np.asarray(rollout.lengths)  # N
  if not np.array_equal(lengths, pack_map.lengths):
    raise ValueError('the plan was made for other lengths; call plan again')
  position = np.arange(tokens.shape[1])
  first = pack_map.prefix_length + 1
  lost = mask & ((position < first) | (position >= lengths[:, None]))
  if lost.any():
    n, t = np.argwhere(lost)[0]
    raise ValueError(
      f'sequence {n} has an action at position {t}; packing keeps actions at'
      f' positions {first} to {lengths[n] - 1} (shared prefix:'
      f' {pack_map.prefix_length} tokens)'
    )
  used = pack_map.source >= 0  # R L
  source = np.where(used, pack_map.source, 0)
  sequence, position = np.divmod(source, tokens.shape[1])
  temperature = _flat(np.asarray(rollout.temperature, np.float32))
  temperature = temperature[sequence]  # R L
  own = pack_map.segment_ids > 0
  return types.Rows(
    tokens=np.where(used, _flat(tokens)[source], 0).astype(np.int32),
    targets=pack(tokens, pack_map),
    positions=np.where(used, position, 0).astype(np.int32),
    segment_ids=pack_map.segment_ids,
    mask=pack(mask, pack_map, fill=False),
    temperature=np.where(own, temperature, np.float32(1)),
  )


def common_prefix(tokens: np.ndarray, prompt_lengths: np.ndarray) -> int:
  """Length of the longest prefix that all sequences share.

  At most the shortest prompt less one token, so that every action is
  predicted from a token of its own sequence.

  Args:
    tokens: [N, T] int.
    prompt_lengths: [N] int, at least 1.
  """
  tokens = np.asarray(tokens)
  limit = int(np.min(prompt_lengths)) - 1
  same = (tokens[:, :limit] == tokens[:1, :limit]).all(axis=0)
  return limit if same.all() else int(same.argmin())


def efficiency(pack_map: PackMap) -> float:
  """Share of the places of the rows that hold a token, 0 to 1."""
  return float((pack_map.source >= 0).mean())


def _flat(array: np.ndarray) -> np.ndarray:
  """All entries in a row; one of 0 where there is none, to look up nothing."""
  return array.reshape(-1) if array.size else np.zeros(1, array.dtype)


def _check_shape(name, array, like):
  if array.shape != like.shape:
    raise ValueError(
      f'{name} has shape {array.shape}, the plan expects {like.shape}'
    )
