"""python -m keras_ddl.cli"""

from keras_ddl.cli import main

main()
