"""Steps without state, and what they compute."""

import tensorflow as tf

from keras_remat.backends.tensorflow.compiled.flatten import flatten

VECTOR = tf.TensorSpec((4,), tf.float32)


def graph_of(function, *specs):
    return tf.function(function, autograph=False, jit_compile=True).get_concrete_function(*specs)


def flat(function, *specs):
    return flatten(graph_of(function, *(specs or (VECTOR,))).graph)


def kinds(stateless):
    return [equation.kind for equation in stateless.program.equations]


def run(stateless, *batch):
    """Computes what a step returns and what it writes, equation by equation, from its numbers."""
    program = stateless.program
    variables = [tf.raw_ops.ReadVariableOp(resource=h, dtype=program.dtypes[at])
                 for at, h in enumerate(stateless.handles, stateless.batch)]  # fmt: skip
    given = [*map(tf.constant, batch), *variables, *stateless.captured]
    document = tf.compat.v1.GraphDef(library=program.library)
    document.node.extend(program.constants.values())
    names = [f"{name}:0" for name in program.given]
    for at, (name, tensor) in enumerate(zip(program.given, given, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (program.shapes[at], program.dtypes[at])
        node = document.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())

    def name_of(atom):
        return names[atom] if isinstance(atom, int) else f"{atom.name}:0"

    for equation in program.equations:
        node = document.node.add()
        node.CopyFrom(equation.source)
        del node.input[:]
        node.input.extend(map(name_of, equation.inputs))
        assert equation.outputs[0] == len(names)
        names += [f"{node.name}:{at}" for at in range(len(equation.outputs))]
    assert len(names) == len(program.shapes)
    wanted = [*stateless.returned, *stateless.written.values()]
    pure = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(document, name=""), []
    ).prune(names[: program.n_given], [name_of(atom) for atom in wanted])
    results = [x.numpy() for x in pure(*given)]
    at = len(stateless.returned)
    handles = [stateless.handles[number - stateless.batch] for number in stateless.written]
    return results[:at], dict(zip(map(id, handles), results[at:], strict=True))


def written_to(stateless, results, variable):
    (at,) = (h for h in stateless.handles if h is variable.handle)
    return results[1][id(at)]
