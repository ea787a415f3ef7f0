"""The element types that collectives reduce: Python's only table of them, in the order of ddl_dtype (ddl.h)."""

# Name -> number in ddl.h. NumPy and TensorFlow use the same names (ml_dtypes for bfloat16).
DTYPES = {
    name: number
    for number, name in enumerate(
        ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8"),
    )
}
