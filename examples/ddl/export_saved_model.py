"""The second half: makes a SavedModel from the base graph and a checkpoint, without DDL."""

import os

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
RESULTS = os.environ.get("RESULT_DIR", "export-output")
PATH = os.path.join(RESULTS, "digits")  # noqa: PTH118

restorer = tf.train.import_meta_graph(PATH + "_basegraph.meta", clear_devices=True)
graph = tf.get_default_graph()
images, logits = graph.get_tensor_by_name("x:0"), graph.get_tensor_by_name("logits:0")
digit = tf.argmax(logits, 1, name="digit")

with tf.Session() as session:
    restorer.restore(session, PATH + "-300")
    info = tf.saved_model.utils.build_tensor_info
    signature = tf.saved_model.signature_def_utils.build_signature_def(
        inputs={"images": info(images)},
        outputs={"digit": info(digit), "logits": info(logits)},
        method_name=tf.saved_model.signature_constants.PREDICT_METHOD_NAME,
    )
    builder = tf.saved_model.builder.SavedModelBuilder(os.path.join(RESULTS, "saved_model", "1"))  # noqa: PTH118
    builder.add_meta_graph_and_variables(
        session,
        [tf.saved_model.tag_constants.SERVING],
        signature_def_map={tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY: signature},
        main_op=tf.tables_initializer(),
        strip_default_attrs=True,
    )
    print("written:", builder.save())
