"""The tree of exceptions: each class under its families and exactly one builtin."""
import builtins
import pickle

import pytest

from fucina import errors
from fucina.errors import FucinaError

FAMILIES = {'Optim': 'OptimError', 'StateDict': 'StateDictError', 'Lora': 'LoraError',
            'Safetensors': 'SafetensorsError', 'TrainerState': 'TrainerStateError',
            'Es': 'EsError'}

# builtin, families, names without the suffix `Error`
TREE = '''
ValueError - Tag ShapeMismatch InvalidShape InvalidDataLength UnsupportedView
TypeError - DType UnsupportedGradient GradientCastUnsupported
IndexError - IndexOutOfBounds
RuntimeError - MutableDataRequiresNoGrad ReadOnlyData NoGradientGraph MissingOutputGradient
RuntimeError - MissingBackwardGradient BackwardAlreadyRun StaleGraph
RuntimeError - NestedCheckpointRecompute CheckpointOutputNotDifferentiable
RuntimeError - CheckpointMissingInputGradient CheckpointCapturedVariable
RuntimeError - ExecScopeRequired UseAfterScope ScopeOrder ScopeClosed ContextThread
RuntimeError - ContextClosed
AssertionError - GradientMismatch
ValueError - NoVariableInputs MissingAnalyticalGradient GradientShapeMismatch
ValueError - InvalidGradcheckOptions
ValueError Es InvalidConfig
ValueError Optim NotAVariable GradShapeMismatch CheckpointConfigMismatch
ValueError Optim,StateDict,Es NonContiguousParam
ValueError Optim,Es DuplicateParam
ValueError Optim,StateDict CheckpointMagicMismatch CheckpointShapeMismatch
ValueError Optim,StateDict CheckpointInvalidName CheckpointDuplicateName
ValueError Optim,StateDict CheckpointDtypeMismatch CheckpointUnsupportedDtype
ValueError Optim,StateDict CheckpointTooManyEntries
KeyError Optim,StateDict CheckpointUnknownName CheckpointMissingEntry
EOFError - EndOfStream
ValueError Safetensors HeaderTooLarge HeaderTooSmall InvalidHeaderLength InvalidHeader
ValueError Safetensors InvalidHeaderDeserialization TensorInvalidInfo InvalidOffset
ValueError Safetensors MetadataIncompleteBuffer ValidationOverflow MisalignedSlice
ValueError Safetensors InvalidTensorName InvalidMetadata UnsupportedDtypeTag InvalidSlice
ValueError Safetensors InvalidIndex DuplicateTensorName
KeyError Safetensors TensorNotFound
ValueError TrainerState InvalidTrainerState UnsupportedTrainerStateVersion
ValueError Lora InvalidRank InvalidDropout
ValueError - PeftUnsupported
RuntimeError Es AnchorMissing NoParams MemberActive MemberNotActive ReplicaDiverged
TypeError Es UnsupportedDType
ValueError Es RewardCountMismatch ReplicaShapeMismatch NonFiniteReward
ValueError - InvalidQuantizedLength InvalidMagic UnsupportedVersion InvalidAlignment
ValueError - UnsupportedValueType MetadataValueOutOfRange InvalidTensorInfo
ValueError - DuplicateMetadataKey UnsupportedGgmlType
KeyError - KeyNotFound
ValueError - NonFiniteValue EncoderUnavailable DecoderUnavailable
ValueError - UnsupportedArchitecture MoeUnsupported InvalidWeightShape
ValueError - UnsupportedWeightType InvalidSequenceLength InvalidLayerRange
ValueError - LabelLengthMismatch KvCacheHeadDimNotBlockAligned
RuntimeError - KvCacheOverflow ContextFull TokenizerUnavailable
ValueError - NoTokenizerVocab UnsupportedTokenizerFormat NoChatTemplate
ValueError - UnsupportedChatTemplate EmptyMessages TrailingAssistantMessage
ValueError - MalformedJsonl EmptyDataset DatasetTooSmall SampleTooLong
ValueError - NoSupervisedTokens InvalidLoaderState
ValueError - MissingAlpha MissingLoraB OrphanLoraB NoAdaptersFound UnknownAdapterName
ValueError - InvalidStateDict QuantizedBaseUnsupported QuantizedSourceUnsupported
ValueError - UnsupportedArgumentCombination QuantizedWeightsUnsupported NoTrainableWeights
ValueError - UnknownArgument InvalidAccumSteps InvalidWorkers InvalidReward
ValueError - InvalidRewardNorm InvalidDScale
RuntimeError - GradVerificationFailed GradientsDoNotPointDownhill ResumeNotBitExact
RuntimeError - FromScratchTrainingFailed
'''
ROWS = [(f'{name}Error', builtin, () if families == '-' else tuple(families.split(',')))
        for builtin, families, *names in map(str.split, TREE.strip().splitlines())
        for name in names]


@pytest.mark.parametrize('name, builtin, families', ROWS, ids=[row[0] for row in ROWS])
def test_class(name, builtin, families):
    c = getattr(errors, name)
    bases = {getattr(errors, FAMILIES[f]) for f in families} or {FucinaError}
    assert set(c.__bases__) == bases | {getattr(builtins, builtin)}
    assert c.__doc__ and c.__doc__.endswith('.')
    e = c('dot over "in": left has in=8, right has in=4')
    assert str(e) == 'dot over "in": left has in=8, right has in=4'
    with pytest.raises(getattr(builtins, builtin)): raise e
    again = pickle.loads(pickle.dumps(e))
    assert type(again) is c and str(again) == str(e)


def test_the_table_is_complete():
    assert len(ROWS) == 135 == len({row[0] for row in ROWS})
    assert set(errors.__all__) == {row[0] for row in ROWS} | {'FucinaError', *FAMILIES.values()}


@pytest.mark.parametrize('family', FAMILIES.values())
def test_families_are_bare(family):
    assert getattr(errors, family).__bases__ == (FucinaError,)


def test_messages_of_several_arguments_and_none():
    assert str(errors.TensorNotFoundError()) == ''
    assert str(errors.TensorNotFoundError('a', 1)) == "('a', 1)"
