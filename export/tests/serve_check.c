// A consumer that is not Python: loads a SavedModel over the TensorFlow C API and answers one float matrix.
//   serve_check DIR INPUT_OP OUTPUT_OP ROWS COLUMNS   reads floats from stdin, writes floats to stdout
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensorflow/c/c_api.h"

static void check(TF_Status* status, const char* what) {
  if (TF_GetCode(status) == TF_OK) return;
  fprintf(stderr, "%s: %s\n", what, TF_Message(status));
  exit(2);
}

int main(int argc, char** argv) {
  if (argc != 6) return 1;
  TF_Status* status = TF_NewStatus();
  TF_Graph* graph = TF_NewGraph();
  TF_SessionOptions* options = TF_NewSessionOptions();
  const char* tags[] = {"serve"};
  TF_Session* session = TF_LoadSessionFromSavedModel(options, NULL, argv[1], tags, 1, graph, NULL, status);
  check(status, "load");
  const int64_t shape[] = {atoll(argv[4]), atoll(argv[5])};
  TF_Tensor* rows = TF_AllocateTensor(TF_FLOAT, shape, 2, shape[0] * shape[1] * sizeof(float));
  if (fread(TF_TensorData(rows), 1, TF_TensorByteSize(rows), stdin) != TF_TensorByteSize(rows)) return 3;
  TF_Output input = {TF_GraphOperationByName(graph, argv[2]), 0};
  TF_Output output = {TF_GraphOperationByName(graph, argv[3]), 0};
  if (input.oper == NULL || output.oper == NULL) return 4;
  TF_Tensor* answer = NULL;
  TF_SessionRun(session, NULL, &input, &rows, 1, &output, &answer, 1, NULL, 0, NULL, status);
  check(status, "run");
  fwrite(TF_TensorData(answer), 1, TF_TensorByteSize(answer), stdout);
  return 0;
}
