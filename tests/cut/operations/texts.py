"""Operations on strings."""

from __future__ import annotations

from typing import Any

from cut.operations.cases import case

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops


@case("StringLower", "StringUpper", "StringStrip", "StringLength", "AsString", "StringToNumber", "StringToHashBucket")
@case("StringToHashBucketFast", "StringToHashBucketStrong", "StaticRegexReplace", "StaticRegexFullMatch")
@case("RegexReplace", "RegexFullMatch", "DecodeBase64", "EncodeBase64", "UnicodeTranscode", "UnicodeScript")
@case("StringJoin", "Substr", "Bucketize")
def texts(x: Any) -> Any:
    numbers = tf.cast(x * 100, tf.int32)
    text = tf.strings.as_string(numbers)
    mixed = tf.strings.join(["  aB", text, "\u00e9 "])
    found = [text, mixed, tf.strings.lower(mixed), tf.strings.upper(mixed), tf.strings.strip(mixed)]
    found += [tf.strings.length(mixed), tf.strings.to_number(text), tf.strings.as_string(tf.reduce_sum(numbers, 0))]
    found += [raw.StringToHashBucket(string_tensor=text, num_buckets=7), tf.strings.to_hash_bucket_fast(text, 9)]
    found += [
        tf.strings.to_hash_bucket_strong(tf.transpose(text), 9, [1, 2]),
        tf.strings.regex_replace(text, "1", "one"),
    ]
    found += [tf.strings.regex_full_match(text, "-.*"), tf.strings.join([text, text[:, ::-1], "x"], "/")]
    pattern = tf.strings.as_string(tf.reduce_max(numbers) % 10)
    found += [raw.RegexReplace(input=text, pattern=pattern, rewrite="[\\0]")]
    found += [raw.RegexFullMatch(input=text, pattern=tf.strings.join([".*", pattern])), tf.sort(numbers, 0)]
    found += [
        tf.io.decode_base64(tf.io.encode_base64(mixed)),
        tf.strings.unicode_transcode(mixed, "UTF-8", "UTF-16-BE"),
    ]
    found += [tf.strings.unicode_script(numbers), tf.strings.substr(mixed, 1, 2)]
    found += [tf.strings.substr(mixed, tf.cast(x[:, :1] > 0, tf.int32), tf.cast(x[:, 1:2] > 0, tf.int32) + 1)]
    column, line = text[:, 0], tf.constant(["a", "b", "c"])
    found += [tf.strings.join([column, column]), tf.gather(line, tf.argmax(x, 1)), tf.reverse(text, [0])]
    found += [raw.Bucketize(input=x, boundaries=[-0.5, 0.0, 1.0]), raw.Bucketize(input=tf.transpose(x), boundaries=[])]
    return [*found, tf.strings.reduce_join(text, 1), tf.strings.reduce_join(text, 0)]
