"""The events of a run, and the list of their contents.

Each process writes one JSON object per event. All have ``e`` (the kind), ``step`` (updates before it) and ``t``
(seconds); ``at`` is a line of the user's, as file:line. Numbers of samples are in files beside the events.

    process     first in each process: pid, parent, rank (variable RANK), argv
    init        a process group was made: rank, world_size, seed, timeout (seconds; null: the default)
    spawn       mp.spawn is called
    loader      a DataLoader was made: loader (its line and number), workers, persistent, sampler, sampler_at (line
                of a DistributedSampler), batch_size, drop_last, iterable, dataset (class), told_epochs (the data set
                has set_epoch)
    split       random_split is called: sizes (of the parts), order (a number for their samples), content (as for
                dataset)
    dataset     a data set is seen first: dataset (number), cls, size, file (of a subset: its samples), objects (length
                and name of the longest list in it), plain (it holds tensors and arrays only), content (a number for
                what it holds)
    pass        a pass of a loader begins: loader, workers; if the samples have numbers: dataset, base (the data set
                below all subsets), batches, file, epochs (of shuffling samplers inside a batch sampler);
                again (the script counts batches itself, and begins this pass in the middle of its epoch)
    batch       a loader gave a batch: loader, wait (seconds)
    pass_end    a stream ended: loader, batches, complete (false: it was cut, and its rest took too long to count); of
                the first pass: file, bags (hashes of its samples, as they are and with their values in any order)
    samples     at the end: what some samples of a data set hold: dataset, cls, collated (by the collate_fn of the
                script), size, contents (by the number of the sample, for each part: a hash, one of its pattern of equal
                entries, how to show it), steady (for each part: whether it is the same when it is read twice), varies
                (whether it is another one with another seed), names (of the parts), attributes (hashes), lines
                (that set them)
    worker_copy     at the end: a data set in which the script has set something since its workers, which stay, were
                given their copies: dataset, loader, cls, names and values_of (as the workers have it, and now), count
                (samples that were compared), differ (those that depend on it), random (they differ anyway)
    handles     first batches of a worker: dataset (class), handles (path, kind, whether its parent has opened it,
                whether the worker has used it), locked (the data set has a lock), lines (that set the attributes)
    fetch       first batches of a process: worker (null: none), count, dataset (class), used (random generators, and
                the states that they had before)
    model       a model is called first: model (number), cls, made (line), parameters, size (elements of them all),
                sharded, groups (of FSDP), blocks (modules of one kind in a row), mesh_dims, tensor_parallel (sharded,
                but not by FSDP), local_norms
    empty       a model got uninitialized memory: to_empty()
    ddp         DistributedDataParallel was made: cls, frozen (number of parameters), find_unused,
                broadcast (of buffers), among (ranks over which it averages)
    forward     a model was called: model, cls, train, grad, loader (of the last batch), random_layers (calls of dropout
                and batch norm in training mode), samples, rows and bags (hashes of each input
                sample, as it is and with its values in any order), further (such hashes of up to
                three other inputs), rng, buffers, untouched (batch norms as made); ddp
                and sync, or inside (line of the DistributedDataParallel that has this module); in evaluation
                mode: drew (random numbers), random_in (what is random or takes statistics of the batch, and its line);
                for_nothing (found when the events are read: it had gradients, but its loader is only validated);
                for_inputs (an input needs a gradient, such as for an attack or a force)
    frozen_mode     a frozen part of a model, which the script has put into evaluation mode, is called in training: cls,
                train (its mode), at (line of the train() that put it back), made (line of its eval()), random_layers,
                local_norms
    stored_weights  (in runs whose weights do not move) a model got them: model, missing (parameters that did not)
    printed     (in runs whose weights do not move) a line with digits: text
    dropout     the first dropout in training
    metric      a schedule is given the value that it goes by: cls, value
    gradients   before an update: optimizer, count, made and made_lr (line and learning rates of the optimizer when it
                was made; at its first update), closure, gradients and weights (key of `weight_key`: sum, sum of
                absolute values, norm), unsharded (names of weights that are not, if others are), lr, state (number of
                entries), scaler (state of a GradScaler), dtypes, factor (size of the gradients, divided by the size
                after backward; null: not all by the same number), others (sums of the weights of models that are in no
                optimizer), kept (size of the gradients, divided by the size of what the script has added up over the
                ranks; null: nothing), kept_buffers (sums of the buffers of wrapped models, other than those of batch
                norm)
    update      after an update: optimizer, parameters, foreign (those of no model that was called), backwards (lines),
                losses (what they minimized), of_terms (whether each adds up several), added (backward added to the
                gradients of the update before), factors (line, samples, weight of a sample, call in the line), elements
                (of sums and means: line, which of that backward pass, elements, weight of one), waits (line and
                operation: count), graphs, graph_at, low_same and low_all (numbers of weights in 16 bits that stayed,
                and all of them), thrown (lines of backward passes whose gradients nothing has used, and of what set
                these to zero), changed_in_backward (buffers), followed (passes whose gradients it uses), left (if it
                also uses gradients that were there since before an update of another optimizer: the line of that
                backward pass, and of its own)
    unused      which weights of wrapped models a backward pass gave no gradient: number (of the pass), names, missing
    checkpoint  a line that checkpoints activations: lost (its weights get no gradient), redrawn (it draws other random
                numbers when it is recomputed)
    optimizer_loaded    an optimizer loads a state
    half        the first autocast in float16 in training
    clip        gradients are clipped: scaled, plain (no sharded tensors), of_no_model (the tensors belong to no model
                that is called), passes (backward passes since the last update)
    collective  one is called, outside of models and of torch: name, size, everyone (in the default group), own (the
                caller is a file of the user's), gradient (whether the tensor is a gradient), features
                (tensors of several dimensions that need gradients), backward, in_step (called in it, or in an update),
                passes (backward passes since the last update)
    unwaited    before an update: a line that starts collectives (async_op=True) which nothing has waited for, count (of
                those whose tensors are gradients of this optimizer), values (gradients that it has)
    total       a tensor is added up over the ranks that was added up before: again (it held that total), before
    sum         a few numbers were added up over the ranks, outside of training: totals
    divisor     a loss is divided by a sum over the ranks: total, own (what this rank has put into it), summed_at, times
                (by which other numbers the loss is multiplied)
    spread      in what is minimized, outputs of one shape became a square: each meets each target: shape, became
    part_norm   an update of the script's own took norms of this rank's part of weights, and exchanged nothing: count
    mapping     at the first update: a dictionary that numbers names: name, size, entries (some of them)
    statistics  a pair such as mean and std that the script holds before the first update, and unchanged after some:
                name, pair (of each: sum, sum of absolute values)
    inner       a collective, or a message, is called in a model's forward: name, features, sums (a Function of the
                script's adds up activations over the ranks, as layers do that are divided), in_function (of a message:
                a Function of the script's that has a backward pass)
    gathered_back   the backward pass of a Function whose forward gathers has ended: at, ranks (of its group), exchanges
                (that it has made), came (of each gradient that came: sum, sum of absolute values)
    functional  one of torch's functional or differentiable collectives is called: name
    trimmed     results of the ranks are combined without the samples that were repeated: loader (of the last batch)
    message     a point-to-point message is sent or received, such as between the stages of a pipeline: overwrites (it
                is received into the memory of an input whose backward pass is still to come), backward (called in it)
    contrast    a cross-entropy whose targets are columns in a row, over gathered features: target (the first column),
                own (that of this rank's first features), columns
    contrast_mask   a loss over gathered features has a mask about one column of each row: mask (its number in the
                loss), count (of its rows), right (those in which the column has the row's own features), columns
    branch      a condition by which this rank alone leaves out a step: at, body (line of what is done then)
    branch_taken    it was taken as true in a run for that: at
    second_pass     of a stream, whether it begins as the first one: loader, equal, changed (epochs of its data set)
    gathered_used   the loss depends on gathered tensors that have no graph (only recorded in a separate run)
    seed        the script seeds a generator, or gives it a whole state (whole): generator, value
    device      a GPU is used by its number, once for each line: index, gpus (that the rank sees), asked (the script has
                asked how many there are)
    profiler    a profiler is made: stacks
    profiled    a trace of a profiler ends: updates (in it)
    compiled    torch.compile is called, which does nothing here
    noise       a line draws random numbers for a batch, after the first update: samples, values (a number for them)
    timeout     the timeout of a group is set later
    group       the script makes a process group: ranks (null: all), timeout (seconds; null: the default)
    part        the value of a sharded tensor was read, of which this rank has a part only: placement
    join        Join: uneven numbers of steps are expected
    write       the script writes a file, once each: file, how
    folder      the script made a folder, and the doctor made it too, for libraries that are not redirected: path
    program     the script starts a program: name
    save, load  torch.save, torch.load: file; tensors, shards, wrapped (names that begin with module.), on_gpu
                (tensors on a GPU); located (map_location is given)
    kept_state  a state is saved, or loaded into its own model (how: save, load), whose weights have been changed since
                state_dict() returned it: made (the line), began (updates before that), names (of the weights)
    kept        two updates after torch.load: where (map_location), size (bytes of its tensors that are still in memory
                and are no weights or states), beside (bytes of all weights)
    sharded     after two updates and at the end: parameters (sharded ones that got gradients), orphans (those
                of them in no optimizer)
    saved_weights   when something is saved, for each optimizer: optimizer, weights and state as in "gradients"
    average     at the end, for each line that updates moving averages in 16 bits: dtype, calls, apart (elements in
                which they differed from the value), stayed (those of them that the update did not change)
    trainable   at the end, for each model: model, parameters, orphans (in no optimizer), orphans_with_gradient
    schedule    at the end, for each scheduler: cls, steps (taken), length (that it is made for), stepped_at (line)
    error       an exception ends the process: type, text, inner (innermost line)
    influence   what a changed sample or token moves in a model: cls, question, answer, text, seconds
    reference   a gradient before it is clipped or used, and the same of a copy of the model, as sketches: name, values
                (their number), wanted (of this rank alone), got (null: none), touched (the script has changed it after
                backward)
    reference_call  a call of the model was repeated with the copy: cls, error (relative difference of the outputs),
                half (computed in 16 bits), random_layers
    reference_update  the first update was repeated: passes (backward passes), half, seconds, averaged (by DDP or
                fully_shard)
    reference_norm  the norm of its gradients was computed: value, true (of the whole gradient)
    reference_failed  it could not be repeated: text
    parts       after the first updates: parts (of each weight: the part that this rank has, and its sums)
    parity      after an update, to compare it with another number of ranks: samples (numbers of all inputs), loss,
                squares (of each gradient: the part that this rank has, its squared norm), sketch (of all weights),
                start (the same before the first update), half
    no_values   operations whose values null GPUs do not compute: names
    end         how: end, error, enough, stopped, spawn
    doctor_failed   the doctor itself: text
"""

from typing import Any, TypedDict


class Event(TypedDict, total=False):
    """A line of a log. Which keys it has depends on ``e``; the list of events above says which."""

    e: str
    step: int
    t: float
    at: str
    # of processes, groups and errors
    pid: int
    parent: int
    rank: Any  # a number, or in "process" the text of the variable RANK
    argv: list[str]
    world_size: int
    seed: int
    timeout: float | None
    ranks: list[int] | None
    type: str
    text: str
    inner: str
    how: str
    began: int
    path: str
    name: str
    # of loaders, data sets and batches
    loader: Any  # the line where it was made, and its number; None in a call before any batch
    workers: int
    persistent: bool
    sampler: str
    sampler_at: str
    batch_size: int | None
    drop_last: bool
    iterable: bool
    told_epochs: bool
    dataset: Any  # the number of a data set; in "loader" and "fetch" its class
    base: int
    batches: int
    epochs: dict[str, int]
    again: bool
    file: Any  # a path, or None
    size: Any  # a number of samples or of values; None if it is not known
    objects: Any  # None, or the length and the name of a list
    content: int
    sizes: list[int]
    order: int
    wait: float
    worker: int | None
    count: int
    used: dict[str, int]
    values: int
    generator: str
    value: float
    # of models and their calls
    model: int
    cls: str
    made: str
    parameters: int
    sharded: bool
    groups: int
    blocks: int
    mesh_dims: int
    tensor_parallel: bool
    local_norms: int
    frozen: int
    among: int
    train: bool
    grad: bool
    random_layers: int
    samples: Any  # a number; in "parity" a list of numbers
    rows: list[int]
    bags: Any  # a list of hashes; in "pass_end" a path
    further: list[list[int]]
    untouched: int
    rng: int
    buffers: list[int]
    ddp: bool
    sync: bool
    inside: str
    # of updates
    optimizer: int
    closure: bool
    gradients: dict[str, list[float] | None]
    weights: dict[str, list[float] | None]
    unsharded: list[str]
    became: list[int]
    shape: list[int]
    lr: list[float]
    made_lr: list[float]
    state: int
    scaler: dict[str, Any] | None
    dtypes: list[str]
    factor: Any  # a number, or None
    others: dict[str, list[float]]
    kept: float | None
    foreign: int
    backwards: list[str]
    losses: list[float]
    of_terms: list[bool]
    added: bool
    factors: list[tuple[str, int, float, int]]
    elements: list[tuple[str, int, int, float]]
    waits: dict[str, int]
    graphs: int
    graph_at: str
    low_same: int
    low_all: int
    scaled: bool
    plain: bool
    of_no_model: bool
    orphans: list[str]
    orphans_with_gradient: int
    steps: int
    length: Any  # a number, or None
    stepped_at: str
    # of collectives and sharded values
    everyone: bool
    own: Any  # whether the caller is the user's; in "divisor" what this rank has put into the total
    gradient: bool
    features: bool
    exchanges: int
    came: list[list[float]]
    sums: bool
    backward: bool
    in_step: bool
    averaged: bool
    passes: int
    placement: str
    before: float
    total: float
    totals: list[float]
    summed_at: str
    times: float
    target: int
    columns: int
    for_nothing: bool
    for_inputs: bool
    mask: int
    right: int
    entries: dict[str, int]
    pair: list[list[float]]
    # of influence, reference and parity
    question: str
    answer: str
    seconds: float
    wanted: list[float]
    got: Any  # a list of numbers, or None
    error: float
    touched: bool
    half: bool
    true: float
    parts: dict[str, list[Any]]
    loss: float
    squares: dict[str, list[Any]]
    sketch: list[float]
    start: Any  # a list of numbers, or None
    # of files
    tensors: int
    shards: int
    wrapped: int
    on_gpu: bool
    located: bool
    names: list[str]
    # of what is shared by accident, and of samples
    dtype: str
    calls: int
    apart: int
    stayed: int
    values_of: list[list[str]]
    differ: int
    random: bool
    complete: bool
    contents: dict[str, list]
    steady: list[bool]
    varies: list[bool]
    collated: bool
    attributes: dict[str, int]
    lines: dict[str, str]
    handles: list[list]
    locked: bool
    asked: bool
    index: int
    gpus: int
    stacks: bool
    updates: int
    where: str
    beside: int
    whole: bool
    # of backward passes
    number: int
    missing: int
    lost: bool
    redrawn: bool
    thrown: list[list[str]]
    changed_in_backward: list[str]
    changed: list[str]
    equal: bool
    body: int
    followed: int
    left: list[str]
    overwrites: bool
    drew: bool
    random_in: list[list[str]]
    find_unused: bool
    broadcast: bool
    kept_buffers: dict[str, list[float] | None]


def weight_key(model: int, name: str) -> str:
    """Return the key of a weight in the events: its name, after the number of its model if that is not the first."""
    return f"{model}:{name}" if model else name


def model_and_name(key: str) -> tuple[int, str]:
    """Return the number of the model and the name of a weight, from its key."""
    number, colon, name = key.partition(":")
    return (int(number), name) if colon and number.isdecimal() else (0, key)
